"""Growth of sums of holdings: of a layer, of a group of a breakdown."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pandas as pd

from leakscope.detect import growth


def group_growth(
    curves: npt.NDArray[np.float64],
    group: npt.NDArray[np.int64],
    life: npt.NDArray[np.int64],
    lives: pd.DataFrame,
    warm_up_s: float | None = None,
) -> pd.DataFrame:
    """Rate and 95 % interval of the sum of the curves of each group, in bytes/s: columns mean, low, high, by group.

    ``curves``: float64[N, bins], kept bytes at the end of each bin of the life; ``group``, ``life``: of each curve;
    ``lives``: of process_lives. Curves of one life are summed before they are judged, deviations of lives add up as
    squares. The means of groups sum to that of all of them together.
    """
    pairs = pd.DataFrame({"group": group, "life": life}).astype("int64")
    cells = pairs.groupby(["group", "life"], sort=True)
    keys = cells.size().reset_index()
    sums = np.zeros((len(keys), curves.shape[1]))
    np.add.at(sums, cells.ngroup().to_numpy(), curves)
    bin_ns = lives.drop_duplicates("life").set_index("life")["bin_ns"]
    bin_s = bin_ns.loc[keys["life"]].to_numpy(np.float64) / 1e9
    warm = growth.warm_up_bins(sums.shape[1], bin_s * sums.shape[1], warm_up_s)
    rates = growth.rates(sums, warm, bin_s)
    squares = pd.DataFrame(
        {"mean": rates.mean, "below": (rates.mean - rates.low) ** 2, "above": (rates.high - rates.mean) ** 2}
    )
    found = squares.groupby(keys["group"]).sum()
    return pd.DataFrame(
        {
            "mean": found["mean"],
            "low": found["mean"] - np.sqrt(found["below"]),
            "high": found["mean"] + np.sqrt(found["above"]),
        }
    )
