"""Octavo beside other engines on recorded workloads: one command installs, runs and prints.

python -m bench.compare WORKLOADS.json                    see __main__.py and bench/README.md

__main__   command line, rounds in which the engines take turns
works      workloads, their scaling, what a run is measured by, checks of lengths
install    one virtual environment per peer, its size
worker     the process an engine runs in: JSON lines in and out, standard library only
peers/     one file per engine: what to install, how to run a batch of requests
report     medians, ratios, text table            plot    the same as SVG
"""
