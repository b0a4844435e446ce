"""The same as `octavo bench attention`; see docs/attention.md.

python -m bench.attention [decode] [blocks] [prefill] [prefix] [calls] [error] [--seconds 1.5] [--isa avx2]
"""

import sys

from octavo.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["bench", "attention", *sys.argv[1:]]))
