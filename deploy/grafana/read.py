"""The board, read by Grafana's own types (pip install grafana-foundation-sdk): nothing of it may be lost."""

import json
import sys
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder  # pyright: ignore[reportMissingImports]
from grafana_foundation_sdk.models.dashboard import Dashboard  # pyright: ignore[reportMissingImports]


def lost(ours, theirs, at=""):
    """Where the second has not what the first has."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return [each for key, value in ours.items() for each in lost(value, theirs.get(key), f"{at}.{key}")]
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        pairs = enumerate(zip(ours, theirs, strict=True))
        return [each for i, (a, b) in pairs for each in lost(a, b, f"{at}[{i}]")]
    return [] if ours == theirs else [at]


board = json.loads((Path(__file__).parent / "dashboards" / "pellucid.json").read_text())
read = json.loads(JSONEncoder().encode(Dashboard.from_json(board)))
if places := lost(board, read):
    sys.exit(f"Grafana does not know {', '.join(places)}")
