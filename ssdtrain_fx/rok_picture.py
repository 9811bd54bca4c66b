"""The recompute-offload-keep curve as a picture and a table: see :mod:`ssdtrain_fx.studies.rok_picture`."""

from ssdtrain_fx.studies.rok_picture import draw_rok, table_rows

__all__ = ["draw_rok", "table_rows"]
