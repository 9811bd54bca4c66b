"""The catalogue of GPUs and drives: plausible figures, names that are found, and data files that are refused."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from ssdtrain_fx.errors import ConfigError
from ssdtrain_fx.projection import catalog
from ssdtrain_fx.projection.catalog import Drive, Gpu, drives, find_drive, find_gpu, gpus, normalised

by_name = pytest.mark.parametrize("device", [*gpus(), *drives()], ids=lambda device: device.name)
each_gpu = pytest.mark.parametrize("gpu", gpus(), ids=lambda gpu: gpu.name)
each_drive = pytest.mark.parametrize("drive", drives(), ids=lambda drive: drive.name)


@by_name
def test_every_device_has_a_source_with_an_address(device: Gpu | Drive) -> None:
    assert all(re.search(r"\S, https?://[^\s]+$", source) for source in device.sources)


@by_name
def test_the_note_says_what_was_not_found(device: Gpu | Drive) -> None:
    assert device.verified or re.search(r"was not|were not|No figure was|found only", device.note or "")


def test_names_differ_in_more_than_case_and_blanks() -> None:
    names = [normalised(device.name) for device in (*gpus(), *drives())]
    assert len(set(names)) == len(names)


@each_gpu
def test_rates_of_a_gpu_are_plausible(gpu: Gpu) -> None:
    flops = gpu.flops_per_s
    assert 10e12 < flops["float32"] < 500e12
    # Halving the bits at least doubles the rate; makers round.
    assert flops["bfloat16"] == flops["float16"] > 1.99 * flops["float32"]
    assert flops.get("fp8", 2 * flops["float16"]) == pytest.approx(2 * flops["float16"], rel=0.01)
    assert 16 * 2**30 <= gpu.memory_bytes <= 300 * 2**30
    assert gpu.memory_bytes % 2**30 == 0
    assert 0.5e12 < gpu.memory_bytes_per_s < 10e12
    assert 30e9 < gpu.host_bytes_per_s <= 450e9
    assert gpu.host_bytes_per_s <= gpu.link_bytes_per_s <= 900e9
    assert 1 <= gpu.gpus_per_node <= 8
    assert gpu.price_usd is None or 1000 < gpu.price_usd < 100_000


@each_drive
def test_rates_of_a_drive_are_plausible(drive: Drive) -> None:
    assert 0.5e12 < drive.capacity_bytes < 32e12
    assert 1e9 < drive.write_bytes_per_s < drive.read_bytes_per_s < 16e9
    # From 0.3 drive writes per day for five years to 100.
    assert 500 < drive.endurance_bytes / drive.capacity_bytes < 200_000
    assert drive.price_usd is None or 50 < drive.price_usd < 20_000


@each_drive
def test_endurance_that_is_rated_in_drive_writes_is_their_product(drive: Drive) -> None:
    if rated := re.search(r"(\d+) drive writes? per day for (\d+) years", drive.note or ""):
        per_day, years = map(int, rated.groups())
        assert drive.endurance_bytes == pytest.approx(drive.capacity_bytes * per_day * 365 * years, rel=1e-9)


@each_drive
def test_the_name_of_a_drive_ends_with_its_capacity(drive: Drive) -> None:
    size, unit = re.findall(r"([\d.]+)([GT])B$", drive.name)[0]
    assert drive.capacity_bytes == pytest.approx(float(size) * {"G": 1e9, "T": 1e12}[unit])


@by_name
def test_a_device_is_a_value_that_cannot_be_changed(device: Gpu | Drive) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        device.name = "another"  # type: ignore[misc]
    assert type(device)(**dataclasses.asdict(device)) == device


@pytest.mark.parametrize("name", ["h100-sxm", "H100 SXM", "h100_sxm", "H100SXM", "200  Sx"])
def test_a_gpu_is_found(name: str) -> None:
    assert find_gpu(name).name == ("H200 SXM" if "200" in name else "H100 SXM")


@pytest.mark.parametrize("name", ["980 pro 1tb", "980-PRO-1TB", "Samsung 980 PRO 1TB", "samsung_980_pro_1tb"])
def test_a_drive_is_found(name: str) -> None:
    assert find_drive(name).name == "Samsung 980 PRO 1TB"


def test_a_whole_name_is_found_although_it_is_part_of_another() -> None:
    assert find_gpu("b200").name == "B200"
    assert find_gpu("gb200").name == "GB200"


def test_a_name_that_fits_several_is_refused_with_these() -> None:
    with pytest.raises(
        ConfigError, match=r"'980' fits several drives .*: Samsung 980 PRO 1TB, Samsung 980 PRO 2TB\. Give"
    ):
        find_drive("980")


def test_an_unknown_name_is_refused_with_the_closest_and_all_names() -> None:
    with pytest.raises(
        ConfigError, match=r"no GPU 'H100 PCX' in the catalogue\. The closest: H100 PCIe, .* All GPUs: "
    ) as told:
        find_gpu("H100 PCX")
    everything = str(told.value).split("All GPUs: ")[1]
    assert everything == ", ".join(gpu.name for gpu in gpus()) + "."


@pytest.mark.parametrize("name", ["", " ", "???"])
def test_a_name_that_resembles_none_is_refused_without_a_hint(name: str) -> None:
    with pytest.raises(ConfigError, match=r"in the catalogue\. All drives: Intel Optane P5800X 1.6TB, "):
        find_drive(name)


REMOVED = object()


def a_file_with(change: dict[str, Any], *, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second object of a data file gets other fields."""
    objects = json.loads((Path(catalog.__file__).parent / name).read_text(encoding="utf-8"))
    objects[1] = {field: value for field, value in (objects[1] | change).items() if value is not REMOVED}
    (folder / name).write_text(json.dumps(objects), encoding="utf-8")
    monkeypatch.setattr(catalog, "FOLDER", folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory_bytes": REMOVED}, r"has no field 'memory_bytes'"),
        ({"colour": "green"}, r"has the unknown field 'colour'; expected name, memory_bytes, "),
        ({"memory_bytes": "80 GB"}, r"has memory_bytes='80 GB'; expected a number above 0"),
        ({"memory_bytes": 1.5}, r"has memory_bytes=1.5; expected a whole number above 0"),
        ({"host_bytes_per_s": 0}, r"has host_bytes_per_s=0; expected a number above 0"),
        ({"host_bytes_per_s": float("nan")}, r"has host_bytes_per_s=nan; expected a number above 0"),
        ({"link_bytes_per_s": float("inf")}, r"has link_bytes_per_s=inf; expected a number above 0"),
        ({"gpus_per_node": True}, r"has gpus_per_node=True; expected a number above 0"),
        ({"price_usd": -1}, r"has price_usd=-1; expected a number above 0"),
        ({"flops_per_s": 312e12}, r"expected a dictionary from dtypes to rates"),
        ({"flops_per_s": {"float32": 1e12}}, r"expected rates for float32, bfloat16, float16, and fp8 if"),
        ({"flops_per_s": {"float32": 0, "bfloat16": 1, "float16": 1}}, r"expected a number above 0"),
        ({"sources": []}, r"has sources=\[\]; expected a list of at least one text"),
        ({"sources": [""]}, r"has sources=\[''\]; expected a text"),
        ({"verified": "yes"}, r"has verified='yes'; expected true or false"),
        ({"note": None}, r"has note=None; expected a text"),
    ],
)
def test_a_damaged_object_is_named(
    change: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_file_with(change, name="gpus.json", folder=tmp_path, monkeypatch=monkeypatch)
    start = r"^gpus\.json of the catalogue is damaged: object 2 \(A100 PCIe 80GB\) "
    with pytest.raises(ConfigError, match=start + ".*" + message):
        gpus()


def test_a_damaged_drive_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_file_with({"endurance_bytes": None}, name="drives.json", folder=tmp_path, monkeypatch=monkeypatch)
    with pytest.raises(
        ConfigError, match=r"drives\.json .* object 2 \(Samsung 980 PRO 1TB\) has endurance_bytes=None; "
    ):
        find_drive("980 pro 2tb")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"it cannot be read \(.*No such file"),
        ('[{"name": ', r"it cannot be read \(Expecting value"),
        ("{}", "it is not a list of objects"),
        ("[1]", "object 1 is 1; expected a dictionary"),
        ("[{}]", r"object 1 \(without a name\) has no field 'name'"),
    ],
)
def test_a_damaged_file_is_named(
    text: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if text is not None:
        (tmp_path / "gpus.json").write_text(text, encoding="utf-8")
    monkeypatch.setattr(catalog, "FOLDER", tmp_path)
    with pytest.raises(
        ConfigError, match=rf"^gpus\.json of the catalogue is damaged: {message}.*\. Correct it, or install"
    ):
        gpus()
