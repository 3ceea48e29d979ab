"""This tree beside an earlier commit: equal results, and times in turns. Read `__main__` first."""
