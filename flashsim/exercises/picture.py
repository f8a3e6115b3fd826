"""Plot the bytes that a solution moved beside the bytes that the reference moved."""

from collections.abc import Mapping
from typing import Any

from flashsim.exercises.exercise import Exercise
from flashsim.exercises.shelf import AnyExercise
from flashsim.trace.trace import Trace


def draw(traces: Mapping[str, Trace], exercise: AnyExercise) -> Any:
    """Draw a bar per trace, stacked by tensor, and a line at the lower bound; return the Axes."""
    from flashsim import viz

    axes = viz.traffic(dict(traces))
    if isinstance(exercise, Exercise) and exercise.bound is not None:
        bound, color = exercise.bound(exercise.task), viz.palette.theme("light").accent
        if any(trace.compulsory() != bound for trace in traces.values()):  # already drawn
            axes.axhline(bound, color=color, lw=1.6, ls=":")
        axes.annotate(
            f"lower bound:\n{bound:,} B", (1, bound), (6, 0), color=color, va="center",
            xycoords=("axes fraction", "data"), textcoords="offset points",
        )  # fmt: skip
    return axes
