"""Tables of measured tiles: read back as written, the user's first, and never without an answer."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from pellucid.kernels.products import tiles
from pellucid.kernels.products.tiles import (
    MANY_ROWS,
    MAX_GEMV_ROWS,
    MAX_ROWS,
    MAX_SPLIT_K_ROWS,
    PACKAGED,
    SPARE,
    ByRows,
    Gemv,
    Persistent,
    SplitK,
    Tile,
    Wgmma,
    choose,
    fitted,
    from_words,
    read_table,
    to_words,
    write_table,
)

CHOICES = {1: Gemv(4, 1024, 4), 16: SplitK(32, 128, 4, 4, 3), 64: None, 96: Wgmma(192, 128, 4, 4)}
PERSISTENT = Persistent(192, 16)
MOST_ROWS = {Gemv: MAX_GEMV_ROWS, SplitK: MAX_SPLIT_K_ROWS, Wgmma: MANY_ROWS}


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this test's user keeps tables; nobody has read any."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tiles.tables.cache_clear()
    return tiles.user_folder()


def test_what_is_written_is_chosen_on_that_device_for_that_shape_alone(cache_folder: Path) -> None:
    write_table(cache_folder, "Some GPU 3000", {("16", 640, 320): CHOICES})
    write_table(cache_folder, "Some GPU 3000", {("8", 640, 320): {1: None}, ("16", 64, 32): {2: None}})
    write_table(cache_folder, "Some GPU 3000", {("8/128", 640, 320): {3: None}})
    where = {"bits": 16, "device_name": "Some GPU 3000"}
    assert choose(640, 320, **where) == CHOICES
    assert choose(64, 32, **where) == {2: None}
    assert choose(640, 320, bits=8, device_name="Some GPU 3000 Ti") == {1: None}
    assert choose(640, 320, bits=8, group=128, device_name="Some GPU 3000") == {3: None}
    for bits in (8, 16):
        ruled = choose(640, 320, bits=bits, device_name="Another GPU")
        assert ruled == tiles.rule_of_thumb(640, 320, bits) != CHOICES


def test_splits_are_no_more_than_there_is_room_for() -> None:
    tile = Wgmma(64, 64, 4, 8)  # of 1,024 outputs 16 blocks
    for num_rows, room, splits in (
        (64, 64, 4),
        (65, 128, 4),
        (65, 127, 2),
        (128, 64, 2),
        (128, 63, 1),
        (512, 9, 1),
    ):
        assert fitted(tile, num_rows, 1024, room + SPARE) == Wgmma(64, 64, splits, 8)
    for other in (None, SplitK(64, 128, 4, 4, 6), Wgmma(192, 256, 1, 4)):
        assert fitted(other, 512, 4096, 1) == other


def test_the_packages_splits_fit_an_h200() -> None:
    for path in PACKAGED.glob("*.json"):
        devices, choices = read_table(json.loads(path.read_text()))
        for (_, num_out, _), measured in choices.items():
            for rows, tile in measured.items():
                assert "NVIDIA H200" not in devices or fitted(tile, rows, num_out, 132) == tile, (
                    num_out,
                    rows,
                )


def test_the_users_table_comes_before_the_packages(
    cache_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "PACKAGED", tmp_path / "package")
    where = {"bits": 16, "device_name": "Some GPU 3000"}
    write_table(tiles.PACKAGED, "Some GPU", {("16", 640, 320): CHOICES, ("16", 64, 32): CHOICES})
    write_table(cache_folder, "Some GPU 3000", {("16", 640, 320): {7: None}})
    assert choose(640, 320, **where) == {7: None}
    assert choose(64, 32, **where) == CHOICES


def test_a_choice_serves_up_to_its_rows() -> None:
    tile = ByRows(CHOICES)
    assert tile(1) == CHOICES[1] and tile(2) == tile(16) == CHOICES[16]
    assert tile(0) is tile(17) is tile(64) is None
    assert tile(65) == tile(96) == CHOICES[96] and tile(97) is None
    assert ByRows({})(1) is None


def test_one_that_goes_from_tile_to_tile_serves_any_number_of_rows() -> None:
    tile = ByRows({8: None, 2048: PERSISTENT})
    assert tile(8) is None and tile(9) == tile(100_000) == PERSISTENT


@pytest.mark.parametrize("tile", [*CHOICES.values(), PERSISTENT], ids=str)
def test_words_come_back_as_the_tile(tile: Tile | None) -> None:
    assert from_words(json.loads(json.dumps(to_words(tile)))) == tile


def test_an_unknown_kernel_is_an_error_that_names_it() -> None:
    with pytest.raises(ValueError, match="'gemw'"):
        from_words(["gemw", 4, 1024, 4])


def test_packaged_tables_hold_what_the_kernels_can_do() -> None:
    paths = list(PACKAGED.glob("*.json"))
    assert "nvidia-h200.json" in [path.name for path in paths]
    for path in paths:
        _, table = read_table(json.loads(path.read_text()))
        assert table, path
        for (kind, _, _), choices in table.items():
            for num_rows, tile in choices.items():
                assert not (kind == "8/128" and isinstance(tile, Wgmma)) or tiles.takes_groups(tile, 128)
                assert 1 <= num_rows <= MOST_ROWS.get(type(tile), num_rows)
                if isinstance(tile, Wgmma):
                    assert tile.block_n in (64, 128, 192), (path, tile)
                    assert tile.rows in (16, 32, 64, 128, 256), (path, tile)
                    assert tile.splits in (1, 2, 4, 8) and 8 * tile.splits <= tile.rows, (path, tile)
                    assert tile.stages * 64 % tile.rows == 0, (path, tile)
                elif isinstance(tile, Persistent):
                    assert tile.rows in (128, 192) and tile.band > 0, (path, tile)
                elif tile:
                    sizes = (tile.block_n, tile.block_k, tile.num_warps)
                    assert all(size & (size - 1) == 0 for size in sizes), (path, tile)


@pytest.mark.parametrize("num_out,num_in", [(1024, 3072), (6144, 1024), (151_936, 1024), (80, 96)])
@pytest.mark.parametrize("bits", [8, 16])
def test_the_rule_of_thumb_stays_within_the_kernels_limits(num_out: int, num_in: int, bits: int) -> None:
    for num_rows, tile in tiles.rule_of_thumb(num_out, num_in, bits).items():
        assert num_rows <= MOST_ROWS.get(type(tile), num_rows)
        if tile and not isinstance(tile, Persistent):
            assert isinstance(tile, (Gemv, SplitK)) and tile.block_k < 2 * num_in


SHAPES = [(1024, 3072), (6144, 1024), (24_576, 4096), (151_936, 1024), (80, 96), (4096, 12_288), (64, 8)]


@pytest.mark.parametrize("num_out,num_in", SHAPES)
@pytest.mark.parametrize("bits", [8, 16])
def test_on_hopper_few_rows_have_a_ring_that_fits(num_out: int, num_in: int, bits: int) -> None:
    num_in = 128 * num_in // bits // 8  # the same bytes
    ruled = tiles.rule_of_thumb(num_out, num_in, bits, hopper=132)
    assert not any(isinstance(tile, SplitK) for tile in ruled.values())
    for num_rows in (2, 16, 17, 32, 33, 64):
        tile = ByRows(ruled)(num_rows)
        assert isinstance(tile, Wgmma) and num_rows <= tile.rows, (num_rows, tile)
        assert tile == fitted(tile, num_rows, num_out, 132), tile
        assert 8 * tile.splits <= tile.rows and tile.stages * 64 % tile.rows == 0, tile
        assert tile.splits <= -(-num_in * bits // 1024), tile  # each has a step
        assert 128 * tile.stages * (tile.block_n + tile.rows) <= 220 << 10, tile
    for shape in ((num_out + 8, num_in), (num_out, num_in + 4)):  # what it cannot multiply
        assert isinstance(ByRows(tiles.rule_of_thumb(*shape, bits, hopper=132))(32), SplitK)


def test_any_number_of_rows_is_for_hopper_where_groups_of_a_step_share_scales() -> None:
    rule = partial(tiles.rule_of_thumb, 4096, 4096, 8)
    for num_rows in (65, MAX_ROWS, MANY_ROWS, 10 * MANY_ROWS):
        tile = ByRows(rule(group=128, hopper=132))(num_rows)
        assert isinstance(tile, Wgmma) and tiles.takes_groups(tile, 128)
        for other in (rule(group=64, hopper=132), rule(group=128), rule(hopper=132)):
            assert ByRows(other)(num_rows) is None
    assert all(isinstance(ByRows(rule(group=32, hopper=132))(rows), SplitK) for rows in (2, 64))


@pytest.mark.parametrize("num_out,num_in", SHAPES[:-1])
def test_integers_have_a_tile_for_any_number_of_rows_on_hopper(num_out: int, num_in: int) -> None:
    how = {"bits": 8, "integers": True, "device_name": "Another GPU"}
    tile = ByRows(choose(num_out, num_in, hopper=132, **how))
    for num_rows in (2, 64, 65, 200, 513, 2048, MANY_ROWS, 10 * MANY_ROWS):
        chosen = tile(num_rows)
        assert isinstance(chosen, (Wgmma, Persistent)), num_rows
        if isinstance(chosen, Wgmma):
            assert chosen.stages * 64 % chosen.rows == 0
            assert 128 * chosen.stages * (chosen.block_n + chosen.rows) <= 225 << 10
    others = choose(num_out, num_in, **how)
    assert others == tiles.rule_of_thumb(num_out, num_in, 8), "which is another kernel for many rows"
    assert ByRows(others)(65) is None


def test_few_rows_of_integers_have_the_tiles_of_fp8_and_a_table_of_their_own_before_that(
    cache_folder: Path,
) -> None:
    few = {1: Gemv(4, 1024, 4), 16: Wgmma(192, 16, 1, 8), 128: Wgmma(64, 128, 2, 8), 192: None, 512: None}
    write_table(cache_folder, "Some GPU", {("8", 640, 320): few})
    how = {"bits": 8, "integers": True, "device_name": "Some GPU", "hopper": 132}
    chosen = choose(640, 320, **how)
    assert {rows: chosen[rows] for rows in (1, 16, 128)} == {rows: few[rows] for rows in (1, 16, 128)}
    assert None not in chosen.values() and max(chosen) == MANY_ROWS
    write_table(cache_folder, "Some GPU", {("int8", 640, 320): CHOICES})
    tiles.tables.cache_clear()
    assert choose(640, 320, **how) == CHOICES


def test_of_many_rows_those_tiles_are_chosen_whose_last_round_ends_first() -> None:
    assert tiles.quickest_ring(4096, 128, 132) == Wgmma(64, 128, 1, 8)  # 64 programs, not 32 or 22
    assert tiles.quickest_ring(4096, 2048, 132) == Wgmma(128, 256, 1, 4)  # two rounds, as with 192 outputs
    assert tiles.quickest_ring(6144, 512, 132) == Wgmma(192, 128, 1, 4)  # 128 programs
    assert tiles.quickest_ring(24_576, 16_384, 132).rows == 256


def test_on_hopper_a_ring_is_for_as_many_multiprocessors_as_there_are() -> None:
    assert tiles.widest_ring(5120, 5120, 16, 16, 132) == Wgmma(64, 16, 1, 20)  # 80 programs
    assert tiles.widest_ring(5120, 5120, 16, 16, 78) == Wgmma(128, 16, 1, 11)  # 40, not two rounds
    assert tiles.widest_ring(24_576, 4096, 16, 16, 132) == Wgmma(192, 16, 1, 8)  # 128
    assert tiles.widest_ring(34_816, 5120, 16, 16, 132) == Wgmma(64, 16, 1, 10)  # 544, two at a time
