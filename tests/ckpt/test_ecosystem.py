"""What reads and writes by fsspec: pyarrow, pandas, dask, zarr, universal_pathlib, Lightning.

They come with `pip install --group ecosystem`.
"""

from __future__ import annotations

import asyncio
import importlib
import pickle

import fsspec
import pytest
from tests.e2e.harness import until

# Of what others warn here nothing is ours.
pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True, scope="module")
def _needs(require):
    try:
        for name in ("pyarrow.parquet", "pandas", "dask.dataframe", "zarr", "upath", "lightning"):
            importlib.import_module(name)
    except ImportError as exc:
        require(False, str(exc))


@pytest.fixture
def options(place, monkeypatch):
    """`ckpt://` means this place to whatever asks fsspec."""
    monkeypatch.setitem(fsspec.config.conf, "ckpt", place.options)
    return place.options


def test_pyarrow_reads_and_writes_data_sets_and_copies_trees_as_ray_does(fs, run, tmp_path):
    import pyarrow as pa
    import pyarrow.dataset as ds
    import pyarrow.fs
    import pyarrow.parquet as pq

    arrow = pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(fs))
    table = pa.table({"x": range(1000), "y": [str(n % 3) for n in range(1000)]})
    pq.write_table(table, f"{run}/one.parquet", filesystem=arrow)
    assert pq.read_table(f"{run}/one.parquet", filesystem=arrow).equals(table)
    ds.write_dataset(table, f"{run}/set", format="parquet", partitioning=["y"], filesystem=arrow)
    found = ds.dataset(f"{run}/set", filesystem=arrow, partitioning=["y"])
    assert found.count_rows() == 1000
    # What Ray Train's storage does with a checkpoint.
    local = tmp_path / "checkpoint"
    (local / "sub").mkdir(parents=True)
    (local / "a.bin").write_bytes(b"a" * 100_000)
    (local / "sub" / "b.bin").write_bytes(b"b")
    arrow.create_dir(f"{run}/checkpoint_1", recursive=True)
    here = pyarrow.fs.LocalFileSystem()
    pyarrow.fs.copy_files(
        str(local), f"{run}/checkpoint_1", source_filesystem=here, destination_filesystem=arrow
    )
    fs.commit(f"{run}/checkpoint_1")
    fs.wait(f"{run}/checkpoint_1", 60)
    back = tmp_path / "back"
    back.mkdir()
    pyarrow.fs.copy_files(
        f"{run}/checkpoint_1", str(back), source_filesystem=arrow, destination_filesystem=here
    )
    assert (back / "sub" / "b.bin").read_bytes() == b"b"
    assert (back / "a.bin").read_bytes() == b"a" * 100_000
    arrow.delete_dir(f"{run}/set")
    assert arrow.get_file_info(f"{run}/set").type == pyarrow.fs.FileType.NotFound


def test_pandas_and_dask_read_and_write(fs, run, options):
    import dask
    import dask.dataframe as dd
    import pandas as pd

    frame = pd.DataFrame({"x": range(100), "y": [n % 7 for n in range(100)]})
    frame.to_csv(f"ckpt://{run}/frame.csv", index=False)
    frame.to_csv(f"ckpt://{run}/frame.csv.gz", index=False)
    frame.to_parquet(f"ckpt://{run}/frame.parquet")
    assert pd.read_csv(f"ckpt://{run}/frame.csv").equals(frame)
    assert pd.read_csv(f"ckpt://{run}/frame.csv.gz").equals(frame)
    assert pd.read_parquet(f"ckpt://{run}/frame.parquet").equals(frame)
    with dask.config.set(scheduler="threads"):
        parts = dd.from_pandas(frame, npartitions=4)
        parts.to_parquet(f"ckpt://{run}/parts")
        assert len(dd.read_parquet(f"ckpt://{run}/parts").compute()) == 100
        parts.to_csv(f"ckpt://{run}/csv/part-*.csv", index=False)
        assert dd.read_csv(f"ckpt://{run}/csv/part-*.csv").x.sum().compute() == frame.x.sum()


def test_zarr_keeps_arrays(fs, run, options):
    import numpy as np
    import zarr

    values = np.arange(10_000).reshape(100, 100)
    array = zarr.create_array(
        f"ckpt://{run}/array.zarr", shape=(100, 100), chunks=(25, 25), dtype=values.dtype
    )
    array[:] = values
    array[3, 4] = -1
    again = zarr.open_array(f"ckpt://{run}/array.zarr", mode="r")
    assert again[3, 4] == -1
    assert (again[50:] == values[50:]).all()


def test_universal_pathlib_walks_reads_and_writes(fs, run, options):
    from upath import UPath

    root = UPath(f"ckpt://{run}/tree")
    (root / "sub").mkdir(parents=True)
    (root / "a.txt").write_text("a")
    (root / "sub" / "b.bin").write_bytes(b"b")
    assert (root / "a.txt").read_text() == "a"
    assert sorted(path.name for path in root.iterdir()) == ["a.txt", "sub"]
    assert [path.name for path in root.glob("**/*.bin")] == ["b.bin"]
    assert (root / "sub").is_dir()
    assert (root / "a.txt").stat().st_size == 1
    (root / "a.txt").rename(root / "c.txt")
    assert not (root / "a.txt").exists()
    assert pickle.loads(pickle.dumps(root / "c.txt")).read_text() == "a"
    with pytest.raises(FileNotFoundError):
        (root / "none").read_bytes()
    (root / "c.txt").unlink()
    (root / "sub" / "b.bin").unlink()
    (root / "sub").rmdir()
    assert list(root.iterdir()) == []


def test_lightning_saves_to_and_resumes_from_urls(fs, run, options):
    import lightning
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.demos.boring_classes import BoringModel

    def trainer(**more):
        saving = ModelCheckpoint(dirpath=f"ckpt://{run}/saved", save_last=True, save_top_k=-1)
        return lightning.Trainer(
            accelerator="cpu",
            max_epochs=2,
            limit_train_batches=2,
            limit_val_batches=0,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[saving],
            **more,
        )

    torch.manual_seed(1)
    trainer().fit(BoringModel())
    names = {name.rpartition("/")[2] for name in fs.ls(f"{run}/saved", detail=False)}
    assert {"last.ckpt", "epoch=0-step=2.ckpt", "epoch=1-step=4.ckpt"} <= names
    with fs.open(f"{run}/saved/last.ckpt") as file:
        assert torch.load(file, weights_only=False)["global_step"] == 4
    later = trainer()
    later.fit_loop.max_epochs = 3
    later.fit(BoringModel(), ckpt_path=f"ckpt://{run}/saved/last.ckpt")
    assert later.global_step == 6
    until("the store's copy", lambda: fs.is_stored(f"{run}/saved/epoch=1-step=4.ckpt"), 60)


def test_the_asynchronous_wrapper_serves_many_at_once(fs, run):
    from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper

    wrapped = AsyncFileSystemWrapper(fs, asynchronous=True)

    async def work() -> list[bytes]:
        await asyncio.gather(
            *(wrapped._pipe_file(f"{run}/many/f{n}", str(n).encode()) for n in range(50))
        )
        return await asyncio.gather(*(wrapped._cat_file(f"{run}/many/f{n}") for n in range(50)))

    assert asyncio.run(work()) == [str(n).encode() for n in range(50)]
