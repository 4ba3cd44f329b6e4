"""Parsing time series."""

from __future__ import annotations

from bench.quality.data.series import parse_weather


def test_missing_hours_and_values_repeat_the_one_before() -> None:
    table = (
        "origin,temp,dewp,humid,wind_dir,wind_speed,wind_gust,precip,pressure,visib,time_hour\n"
        "JFK,39,26,59,270,10,NA,0,NA,10,2013-01-01T06:00:00Z\n"
        "JFK,41,27,61,NA,8,NA,0,1012,10,2013-01-01T08:00:00Z\n"
        "EWR,50,26,59,270,10,NA,0,1010,10,2013-01-01T06:00:00Z\n"
        "EWR,60,26,59,270,10,NA,0,1010,10,2014-01-01T01:00:00Z\n"
    )
    weather = parse_weather(iter([("weather.csv", table.encode())]))["weather"]
    assert weather.shape == (2, 8760, 8)
    assert weather[1, [0, 6, 7, 8, 9], 0].tolist() == [39, 39, 39, 41, 41]
    assert weather[1, [6, 8], 3].tolist() == [270, 270]
    assert weather[1, [6, 8], 6].tolist() == [1012, 1012]
    assert weather[0, -1, 0] == 50
