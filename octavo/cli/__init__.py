"""The `octavo` command: serve, generate and chat.

    main.py      the parser, and errors as one line      options.py  options that commands share
    serve.py · generate.py · chat.py   one command each  loading.py  engine and start-up table

Nothing here imports torch before a command runs, so that --help answers at once.
"""
