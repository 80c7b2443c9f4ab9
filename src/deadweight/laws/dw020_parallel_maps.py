"""DW020 parallel maps: two linear maps of one value whose results are added are one linear map."""

from __future__ import annotations

from functools import partial

from deadweight.claims.claim import Title
from deadweight.laws.law import Kept, Law, Search
from deadweight.search.parallel_maps import find_parallel_maps

TITLE = Title("DW020", "parallel-maps")

LAW = Law(
    title=TITLE,
    fix="add the smaller map's matrix to the full weight beside it, and leave the map out",
    searches=(Search(85, partial(find_parallel_maps, law=TITLE)),),
    rewriting=Kept("both maps stay in the model's code: leave one out there, then the weights can be added"),
)
