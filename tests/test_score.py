"""`cdlrm eval` and `cdlrm predict`: the trained model, from a checkpoint, on new files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.orc
import pyarrow.parquet
import pytest
import torch

from cdlrm.cli import main
from cdlrm.config import TrainConfig
from cdlrm.datasets import open_datasets
from cdlrm.train import Trainer

COLUMNS: dict[str, Any] = {
    "label_column": "clicked", "dense_columns": ["age", "price"], "sparse_columns": ["user", "item", "seen"],
}  # fmt: skip


def own_table(rows: int, seed: int, labels: bool = True, ids: int = 500) -> pa.Table:
    """Somebody's logs, with names of their own and a list column."""
    random = np.random.default_rng(seed)
    user, item = random.integers(0, ids, (2, rows))
    table = {
        "clicked": (random.random(rows) < 0.2 + 0.5 * (user % 2)).astype(np.int64),
        "age": random.random(rows),
        "price": random.integers(0, 100, rows),
        "user": user,
        "item": item,
        "seen": [list(map(int, random.integers(0, ids, n))) for n in random.integers(0, 4, rows)],
    }
    if not labels:
        del table["clicked"]
    return pa.table(table)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A trained checkpoint, the final evaluation of the training, and what its model says of files."""
    folder = tmp_path_factory.mktemp("run")
    pa.parquet.write_table(own_table(3000, 1), folder / "train.parquet", row_group_size=700)
    pa.parquet.write_table(own_table(1000, 2), folder / "test.parquet", row_group_size=300)
    pa.parquet.write_table(own_table(900, 3, labels=False, ids=10**9), folder / "unseen.parquet", row_group_size=400)
    pa.orc.write_table(own_table(900, 3, labels=False, ids=10**9), folder / "unseen.orc")
    config = TrainConfig(
        data=[str(folder / "train.parquet")], test_data=[str(folder / "test.parquet")], table_rows="400-300-2000",
        mini_batch_size=128, arch_sparse_feature_size=8, checkpoint_dir=str(folder / "kept"), **COLUMNS,
    )  # fmt: skip
    with Trainer(config) as trainer:
        report = trainer.run()
        said = {}
        for name in ("test", "unseen"):
            told = pa.parquet.read_table(folder / f"{name}.parquet")
            if name == "unseen":
                told = told.append_column("clicked", pa.array(np.zeros(900, np.int64)))
            pa.parquet.write_table(told, folder / "told.parquet")
            source = open_datasets(
                TrainConfig(
                    data=[str(folder / "told.parquet")], test_fraction=0.0, table_rows="400-300-2000",
                    mini_batch_size=128, **COLUMNS,
                ), [],
            ).train  # fmt: skip
            with torch.no_grad():
                said[name] = torch.cat([torch.sigmoid(trainer.model(b.dense, b)) for b in source]).numpy()
    return {"folder": folder, "report": report, "said": said, "kept": str(folder / "kept")}


def test_eval_gives_the_metrics_of_the_end_of_training(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    file, data = run["folder"] / "metrics.json", str(run["folder"] / "test.parquet")
    assert main(["eval", "--checkpoint", run["kept"], "--data", data, "--json", str(file)]) == 0
    captured = capsys.readouterr()
    metrics = json.loads(file.read_text(encoding="utf-8"))["metrics"]
    last = dict(run["report"]["evaluations"][-1])
    del last["step"]
    assert metrics.keys() == last.keys()
    for name, value in last.items():
        assert metrics[name] == pytest.approx(value, rel=1e-6), name
    assert f"{metrics['auc']:.5f}" in captured.out and "eval" in captured.err


@pytest.mark.parametrize("file,batch", [("test.parquet", 128), ("unseen.parquet", 128), ("unseen.orc", 77)])
def test_predict_writes_what_the_model_says(
    run: Any, tmp_path: Path, file: str, batch: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ids that were never seen are hashed as any other; without labels there is no label column."""
    out, name = tmp_path / "out.parquet", file.partition(".")[0]
    flags = ["--data", str(run["folder"] / file), "--out", str(out), "--mini-batch-size", str(batch), "--no-progress"]
    assert main(["predict", "--checkpoint", run["kept"], *flags]) == 0
    captured = capsys.readouterr()
    assert str(out) in captured.out and captured.err == ""
    found = pa.parquet.read_table(out)
    assert found.column_names == ["row", "probability"] + ["label"] * (name == "test")
    expected = run["said"][name]
    assert found["row"].to_numpy().tolist() == list(range(len(expected)))
    probabilities = found["probability"].to_numpy()
    if batch == 128:
        assert probabilities.tobytes() == expected.tobytes()
    assert probabilities == pytest.approx(expected, abs=1e-6)
    if name == "test":
        told = pa.parquet.read_table(run["folder"] / file)["clicked"].to_numpy()
        assert np.array_equal(found["label"].to_numpy(), told)
    assert [path.name for path in tmp_path.iterdir()] == ["out.parquet"]


def test_a_file_store_serves_too(run: Any, tmp_path: Path) -> None:
    data, out = str(run["folder"] / "unseen.parquet"), tmp_path / "out.parquet"
    flags = ["--data", data, "--out", str(out), "--store", f"file:{tmp_path / 'rows'}", "--no-progress"]
    assert main(["predict", "--checkpoint", run["kept"], *flags]) == 0
    assert pa.parquet.read_table(out)["probability"].to_numpy().tobytes() == run["said"]["unseen"].tobytes()


def test_a_broken_file_leaves_the_old_output(run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, data = tmp_path / "out.parquet", tmp_path / "bad.parquet"
    out.write_text("from before", encoding="utf-8")
    table = own_table(600, 4)
    prices = table["price"].to_numpy().astype(float)
    prices[500] = np.nan
    pa.parquet.write_table(table.set_column(2, "price", pa.array(prices, from_pandas=False)), data, row_group_size=200)
    flags = ["predict", "--checkpoint", run["kept"], "--data", str(data), "--out", str(out), "--no-progress"]
    assert main(flags) == 2
    assert "exists already; pass --overwrite to replace it, or name another file." in capsys.readouterr().err
    assert main([*flags, "--overwrite"]) == 1
    err = capsys.readouterr().err
    assert "row 500" in err and "'price'" in err and err.count("\n") == 1
    assert out.read_text(encoding="utf-8") == "from before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.parquet", "out.parquet"]
    pa.parquet.write_table(table, data)
    assert main([*flags, "--overwrite"]) == 0
    assert pa.parquet.read_table(out).num_rows == 600


def test_wrong_turns_are_one_sentence(run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.parquet"
    pa.parquet.write_table(own_table(10, 5).drop_columns(["item"]), other)
    renamed = tmp_path / "renamed.tsv"
    renamed.write_text("\t".join(["1", *["2"] * 13, *["0f"] * 26]) + "\n", encoding="utf-8")
    unseen, kept = str(run["folder"] / "unseen.parquet"), run["kept"]
    pipe = tmp_path / "pipe.parquet"
    os.mkfifo(pipe)
    for code, words, flags in [
        (2, "--checkpoint is missing", ["eval", "--data", unseen]),
        (2, "--data is missing", ["predict", "--checkpoint", kept, "--out", "x"]),
        (2, "--out is missing", ["predict", "--checkpoint", kept, "--data", unseen]),
        (2, "its folder does not exist", ["predict", "--checkpoint", kept, "--data", unseen, "--out", "/no/such/x"]),
        (2, "end in .parquet", ["predict", "--checkpoint", kept, "--data", unseen, "--out", str(tmp_path / "x.csv")]),
        (2, "no regular file", ["predict", "--checkpoint", kept, "--data", unseen, "--out", str(pipe)]),
        (1, "does not exist", ["eval", "--checkpoint", str(tmp_path / "none"), "--data", unseen]),
        (1, "no complete checkpoint", ["eval", "--checkpoint", str(tmp_path), "--data", unseen]),
        (1, "cdlrm predict, which needs none", ["eval", "--checkpoint", kept, "--data", unseen]),
        (1, "no column 'item'", ["eval", "--checkpoint", kept, "--data", str(other)]),
        (2, "tsv files do not know", ["eval", "--checkpoint", kept, "--data", str(renamed)]),
        (2, "did you mean --checkpoint?", ["eval", "--chekpoint", kept, "--data", unseen]),
        (2, "name a new one", ["eval", "--checkpoint", kept, "--data", unseen, "--store", f"file:{tmp_path}"]),
        (2, "at least 1", ["eval", "--checkpoint", kept, "--data", unseen, "--mini-batch-size", "0"]),
    ]:
        assert main([*flags, "--no-progress"]) == code, flags
        err = capsys.readouterr().err
        assert words in err and err.count("\n") == 1, err
