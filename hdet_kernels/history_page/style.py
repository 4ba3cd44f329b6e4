"""The style sheet of the page. Colours are variables, with one set for light and one for dark."""

from __future__ import annotations

#: Colours of up to eight replicas or groups, that also people with colour blindness can tell apart: (light, dark).
COLOURS = (
    ("#2f6fb3", "#6aa9e8"),
    ("#c8590a", "#f0924a"),
    ("#1f8a5f", "#4fc497"),
    ("#b03a80", "#e683bd"),
    ("#6b55b5", "#a795ec"),
    ("#8a6d00", "#cfae3c"),
    ("#0f8296", "#4cc0d4"),
    ("#8a4b3a", "#cf8f7d"),
)


def _variables(which: int) -> str:
    return "".join(f"--c{number}:{pair[which]};" for number, pair in enumerate(COLOURS))


STYLE = f"""
:root{{color-scheme:light dark;--page:#f6f7f9;--card:#fff;--ink:#1b2330;--soft:#596273;--line:#dfe3ea;--base:#1b2330;
--bad:#b3261e;--good:#1f8a5f;--scout:#8a6d00;{_variables(0)}}}
@media (prefers-color-scheme:dark){{:root{{--page:#12161c;--card:#1a2029;--ink:#e7ebf1;--soft:#a3adbb;--line:#2f3844;
--base:#f2f4f8;--bad:#ff8a80;--good:#4fc497;--scout:#cfae3c;{_variables(1)}}}}}
*{{box-sizing:border-box}}
body{{margin:0;padding:2rem 1rem 4rem;background:var(--page);color:var(--ink);line-height:1.5;
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}}
main,header,footer{{max-width:1080px;margin:0 auto}}
h1{{font-size:1.6rem;margin:0 0 .2rem}}h2{{font-size:1.2rem;margin:2.2rem 0 .7rem}}h3{{font-size:1rem;margin:0}}
header p,figcaption p,.soft{{color:var(--soft);margin:0}}footer{{color:var(--soft)}}figcaption p{{font-size:.85rem}}
.cards{{display:grid;grid-template-columns:repeat(auto-fit,minmax(210px,1fr));gap:.8rem;margin:1.4rem 0 0;padding:0}}
.cards div,figure,.box{{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:.8rem 1rem}}
.cards dt{{color:var(--soft);font-size:.82rem}}
.cards dd{{margin:0;font-size:1.25rem;font-weight:600;font-variant-numeric:tabular-nums}}
.cards dd small{{display:block;font-size:.8rem;font-weight:400;color:var(--soft)}}.cards .bad dd{{color:var(--bad)}}
.charts{{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,460px),1fr));gap:1rem}}
figure{{margin:0;min-width:0}}figure.wide{{grid-column:1/-1}}figure>svg{{display:block;width:100%;height:auto}}
figure.wide{{overflow-x:auto}}figure.wide>svg{{min-width:620px}}
svg text{{fill:var(--soft);font-size:12px;font-variant-numeric:tabular-nums}}
.end{{text-anchor:end}}.middle{{text-anchor:middle}}
path,rect{{fill:none;stroke:var(--c)}}.grid{{--c:var(--line);stroke-width:1}}.axis{{--c:var(--soft);stroke-width:1}}
.zero{{--c:var(--soft);stroke-width:1.2}}.line{{stroke-width:1.5;stroke-linejoin:round}}.strong{{stroke-width:2.6}}
.dots{{stroke-width:3.6;stroke-linecap:round}}.bar{{stroke-width:1.3;opacity:.65}}
.band{{fill:var(--c);stroke:none;opacity:.2}}.mark{{stroke-width:1.4;stroke-dasharray:4 3}}
{"".join(f".c{number}{{--c:var(--c{number})}}" for number in range(len(COLOURS)))}
.base{{--c:var(--base)}}.bad{{--c:var(--bad)}}.scout{{--c:var(--scout)}}.soft{{--c:var(--soft)}}
.legend{{display:flex;flex-wrap:wrap;gap:.15rem 1rem;list-style:none;margin:.4rem 0 0;padding:0;font-size:.83rem}}
.legend .dots{{stroke-width:7}}.legend .key{{width:18px;height:10px;margin-right:.4rem}}
.scroll{{overflow-x:auto}}table{{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:.88rem;width:100%}}
th,td{{text-align:right;padding:.3rem .7rem;border-bottom:1px solid var(--line);white-space:nowrap}}
th:first-child,td:first-child{{text-align:left}}th{{color:var(--soft);font-weight:600}}
caption{{text-align:left;color:var(--soft)}}tr:last-child td{{border-bottom:0}}
.text th,.text td{{text-align:left}}.text td:first-child{{width:8rem}}
details{{margin-top:1rem}}summary{{cursor:pointer;font-weight:600}}
details .scroll{{margin-top:.7rem;max-height:30rem;overflow:auto}}
footer{{padding-top:2.5rem;font-size:.85rem}}
"""
