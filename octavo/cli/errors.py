"""What can go wrong on the command line, apart from what lower layers refuse."""

from octavo.errors import OctavoError


class CommandError(OctavoError):
    """Something outside the engine is in the way: a port, a file."""
