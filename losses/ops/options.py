"""Named options of a hyperparameter."""

import difflib
from collections.abc import Collection


def check_option(what: str, given, options: Collection[str]) -> None:
    """Raises an error if `given` is not one of the options.

    Raises:
      ValueError: names what was given, the options, and the nearest of them.
    """
    if given in options:
        return
    close = difflib.get_close_matches(str(given), list(options), n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ValueError(f"Unknown {what} {given!r}; one of {', '.join(options)}.{hint}")
