"""Find texts of a Matplotlib figure that overlap, are cut off, or are crossed by a line."""

from itertools import combinations

from matplotlib.lines import Line2D
from matplotlib.text import Text

#: Pixels, at 100 dpi, by which text boxes may overlap: a box is larger than its letters.
SLACK = 2


def overlaps(figure):
    """Return sentences that say which texts overlap or leave the figure."""
    figure.set_dpi(100)
    figure.canvas.draw()
    whole = figure.bbox
    texts = [(text, text.get_window_extent()) for text in _texts(figure)]
    found = [
        f"{text.get_text()!r} leaves the figure"
        for text, box in texts
        if box.x0 < -1 or box.y0 < -1 or box.x1 > whole.x1 + 1 or box.y1 > whole.y1 + 1
    ]
    for (one, a), (two, b) in combinations(texts, 2):
        wide = min(a.x1, b.x1) - max(a.x0, b.x0)
        high = min(a.y1, b.y1) - max(a.y0, b.y0)
        if (
            wide > SLACK
            and high > SLACK
            and not (one.get_rotation() % 90 or two.get_rotation() % 90)
        ):
            found.append(f"{one.get_text()!r} on {two.get_text()!r}")
    return found


def crossings(figure):
    """Return sentences that say which plain texts inside the axes a data line crosses."""
    figure.canvas.draw()
    found = []
    for ax in figure.axes:
        lines = [line for line in ax.lines if line.get_visible() and line.get_linestyle() != "None"]
        for text in ax.texts:
            if not _shown(text) or text.get_bbox_patch() is not None or text.get_path_effects():
                continue
            box = text.get_window_extent()
            for line in lines:
                if _crosses(line, box):
                    found.append(f"a line through {text.get_text()!r}")
    return found


def _crosses(line: Line2D, box):
    path = line.get_transform().transform_path(line.get_path())
    inner = box.from_extents(box.x0 + SLACK, box.y0 + SLACK, box.x1 - SLACK, box.y1 - SLACK)
    return len(path.vertices) > 1 and path.intersects_bbox(inner, filled=False)


def _texts(figure):
    """Yield every text that is drawn; of an axis only the tick labels inside the view."""
    hidden = set()
    for ax in figure.axes:
        for axis in (ax.xaxis, ax.yaxis):
            low, high = sorted(axis.get_view_interval())
            for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
                if not low <= tick.get_loc() <= high:
                    hidden |= {tick.label1, tick.label2}
    return [text for text in figure.findobj(Text) if text not in hidden and _shown(text)]


def _shown(text):
    if not (text.get_visible() and text.get_text().strip()):
        return False
    return text.get_window_extent().width > 0
