"""Many training runs (or simulations) over cache sizes, horizons and prefetch depths: one JSON line each, and figures.

points.py  the grid: which runs, each with its whole settings     run.py      runs what the file does not hold yet
figures.py what the lines say                                     command.py  `cdlrm sweep`
"""
