"""Import this before transformers: it imports torchvision where that is installed, here without compiled operators."""

from __future__ import annotations

from foreign_operators import skip_fakes

skip_fakes("torchvision::")
