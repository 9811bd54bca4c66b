"""The string argument of ``offload``: any value comes back, and no language has to escape it."""

from __future__ import annotations

import math
import string
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssdtrain_fx.runtime.config import EngineConfig
from ssdtrain_fx.runtime.sites import Site, from_text, to_text

HARMLESS = frozenset(string.ascii_letters + string.digits + "_.-~/,:+%=;|")

texts = st.text(st.characters(codec=None))  # with lone surrogates, as in paths with undecodable bytes
numbers = st.floats(allow_nan=False)


@given(
    st.builds(
        Site,
        name=texts,
        out_s=st.none() | numbers,
        back_s=st.none() | numbers,
        stall_s=numbers,
        graph_name=texts,
        external=st.booleans(),
        host=st.booleans(),
        reload_order=st.none() | st.integers(),
        engine=st.builds(
            EngineConfig,
            ssd_dir=st.none() | texts | st.lists(texts).map(tuple),
            host_budget_bytes=st.none() | st.integers(),
            checksum=st.booleans(),
            io_timeout_s=st.none() | numbers,
        ).map(EngineConfig.to_argument),
    )
)
def test_every_site_comes_back_from_harmless_characters(site: Site) -> None:
    argument = site.to_argument()
    assert Site.from_argument(argument) == site
    assert set(argument) <= HARMLESS


@given(
    st.builds(EngineConfig, ssd_dir=st.none() | texts | st.lists(texts).map(tuple), io_timeout_s=st.none() | numbers)
)
def test_every_engine_comes_back(config: EngineConfig) -> None:
    assert EngineConfig.from_argument(config.to_argument()) == config


@pytest.mark.parametrize(
    "value", ["null", "1", "-Infinity", '"', "[]", "", "a;b=c|d%e", "\\n'\"\n", None, True, 1.5, math.inf]
)
def test_a_string_that_looks_like_another_value_stays_a_string(value: object) -> None:
    found: Any = from_text(to_text({"value": value}))["value"]
    assert (found, type(found)) == (value, type(value))


def test_a_site_can_be_read() -> None:
    engine = EngineConfig(ssd_dir="/mnt/nvme0", io="aio").to_argument()
    site = Site(name="addmm_3", out_s=0.0021, back_s=None, host=True, engine=engine)
    assert site.to_argument() == "name=addmm_3;out_s=0.0021;host=true|ssd_dir=/mnt/nvme0;io=aio"
    assert Site(name="a b").to_argument() == "name=a%20b|"
