"""`Mosaic` draws a grid of single-coloured tiles by writing pixels into Matplotlib's canvas.

An animation draws hundreds of frames of such grids. Copying pixels into the canvas takes a
hundredth of the time that Matplotlib takes to resample an image.
"""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes

from flashsim.viz.palette import rgb

_GAP_FROM = 6  # the fewest pixels per tile for which lines between tiles are drawn


class Mosaic:
    """A grid of `rows` x `cols` tiles drawn in a box of an Axes.

    Attributes
    ----------
    colors : ndarray of uint8, (rows, cols, 3)
        The colours of the tiles; see `paint`.
    """

    def __init__(
        self, ax: Axes, box: tuple[float, float, float, float], rows: int, cols: int, gap: str
    ) -> None:
        x, y, w, h = box
        corners = ax.transData.transform([(x, y), (x + w, y + h)]).round().astype(int)
        (left, bottom), (right, top) = corners.min(axis=0), corners.max(axis=0)
        height, width = max(top - bottom, 1), max(right - left, 1)
        self._i = np.arange(height) * rows // height
        self._j = np.arange(width) * cols // width
        self._between_rows = _edges(self._i, height >= _GAP_FROM * rows)
        self._between_cols = _edges(self._j, width >= _GAP_FROM * cols)
        self._gap = rgb(gap)
        self.colors = np.zeros((rows, cols, 3), np.uint8)
        page = round(ax.figure.bbox.height)
        self._where = (slice(page - bottom - height, page - bottom), slice(left, left + width))
        self._pixels = np.zeros((height, width, 3), np.uint8)

    def paint(self, colors: np.ndarray) -> None:
        """Set the tiles' colours, uint8 (rows, cols, 3), which the next `draw` shows."""
        if np.array_equal(colors, self.colors):
            return
        self.colors = colors
        pixels = colors[self._i[:, None], self._j]
        pixels[self._between_rows] = self._gap
        pixels[:, self._between_cols] = self._gap
        self._pixels = pixels

    def draw(self, canvas: np.ndarray) -> None:
        """Copy the tiles into a canvas, uint8 (height, width, 4)."""
        canvas[(*self._where, slice(3))] = self._pixels


def _edges(tile: np.ndarray, wanted: bool) -> np.ndarray:
    """Return the index of each pixel at which a new tile begins, except the first tile."""
    return np.flatnonzero(np.diff(tile)) + 1 if wanted else np.zeros(0, int)
