"""How much work a measurement of the machine does."""

from __future__ import annotations

MIB = 1 << 20


class Effort:
    """Amount of measuring: it takes seconds in total when ``quick``, less than a minute otherwise."""

    def __init__(self, *, quick: bool, on_gpu: bool) -> None:
        self.kernel_repeats = 5 if quick else 15
        self.kernel_budget_s = 0.04 if quick else 0.5
        """Each kind of kernel is repeated for at least this long."""
        self.stream_bytes = (256 if on_gpu else 64) * MIB * (1 if quick else 2)
        """Per operand. Three of them exceed most caches."""
        self.small_bytes = 1 * MIB
        self.large_bytes = 8 * MIB
        self.small_count = 16 if quick else 64
        self.large_count = 4 if quick else 24
        """Transfers in a row, 32 MiB or 192 MiB in total."""
        self.transfer_repeats = 3 if quick else 7

    @property
    def file_bytes(self) -> int:
        """Free space that the SSD must have: one set of transfers is written while another set is read."""
        return 2 * max(self.small_count * self.small_bytes, self.large_count * self.large_bytes)
