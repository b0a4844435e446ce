"""The `octavo` command.

    main.py      the parser, and errors as one line      options.py  options that commands share
    serve.py · generate.py · chat.py   one command each  loading.py  engine and start-up table
    plan.py · top.py · replay.py · bench.py              load_*.py   what `bench serve` sends and reports

Nothing here imports torch before a command runs, so that --help answers at once.
"""
