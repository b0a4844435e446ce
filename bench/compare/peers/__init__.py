"""One module per engine. It is imported by the harness and, in the engine's own environment, by worker.py,
so its top level uses the standard library only. It holds

    PACKAGE     the distribution whose version, size and dependencies are reported
    INSTALL     pip arguments, one list per call; empty: this project's own environment
    label(options) -> str                     the column's title
    Engine(setup: dict).run(requests) -> answers · .facts -> dict[str, str] · .close()

setup: model (path of a GGUF file), threads, kv_tokens, max_len, slots, options (from the command line).
request: prompt (token ids), max_tokens, n, temperature; end-of-text must be ignored. All are sent at once.
answer, in the same order: prompt (tokens that the engine counted), tokens (a list of ids per sample),
first (seconds from the start of the batch to the first token, None where unknown), end (seconds to the
last), error (None or text).
"""
