"""Window, planner and plan: which rows to copy and evict for each batch, by next use."""

from .minimum import MinCounter
from .plan import Plan, check_plan
from .planner import Planner, shards_for

__all__ = ["MinCounter", "Plan", "Planner", "check_plan", "shards_for"]
