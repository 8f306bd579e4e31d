"""A line for whoever watches a start: what is being done, and so what takes so long.

To a terminal alone; elsewhere it is in the log, at INFO, as all else.
"""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger(__name__)


def tell(doing: str) -> None:
    """Say what begins now."""
    logger.info("%s", doing)
    is_shown = logger.isEnabledFor(logging.INFO)  # then it is on the screen already
    if not is_shown and sys.stderr is not None and sys.stderr.isatty():
        sys.stderr.write(f"pellucid: {doing} ...\n")
        sys.stderr.flush()
