"""One sentence that says what would help: a bigger cache, a longer horizon, or a faster link, and by how much.

Only bounds that were counted or measured in the run itself: MIN (Belady's optimum on the same batches) at this cache
and at one twice as large, and the time that the trainer waited.  Whatever fills fewer rows saves at most that time,
since copies overlap with computing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def advice(report: Mapping[str, Any]) -> str | None:
    """The sentence for a training report; None where nothing was filled (everything resident, or no step).

    "up to": the optimum is compared with what was filled, so no policy can save more than that.
    """
    cache, seconds = report["cache"], report["seconds"]
    fills, least, double = cache["fills"], cache["mind_fills"], cache["mind_fills_double"]
    training = seconds["total"] - seconds["evaluation"] - seconds["checkpoint"]
    if not fills or training <= 0:
        return None
    parts = [f"a cache twice as large would fill {_up_to(fills, double)}"]
    if fills > least and cache["horizon"] >= report["training"]["steps"] / max(report["training"]["epochs"], 1):
        parts.append("a longer horizon no fewer rows, since none reaches past the end of an epoch")
    else:
        parts.append(f"a longer horizon {_up_to(fills, least)}")
    waited = min(seconds["stall"] / training, 1.0)
    what = "for rows" if seconds["read"] < seconds["stall"] / 2 else "for rows or for the data"
    parts.append(
        f"a faster link would fill as many, and like the others save at most the {100 * waited:.1f} % of the time that "
        f"the trainer waited {what}"
    )
    sentence = "; ".join(parts)
    return sentence[0].upper() + sentence[1:] + "."


def _up_to(now: int, then: int) -> str:
    saved = 100 * (now - then) / now
    return "no fewer rows" if saved < 0.05 else f"up to {saved:.1f} % fewer rows"
