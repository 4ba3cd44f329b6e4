"""The records of syncs, and who is told of them.

``records.py`` has the records and their summary, ``history_file.py`` writes each to a file, ``metrics.py`` gives them
names for loggers, and ``sync_callbacks.py`` has what the user wants to be called after a sync.
"""
