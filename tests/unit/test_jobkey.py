"""Job keys and ranks from an environment."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptgate.model.jobkey import OUTSIDE, JobKey, JobKind, RankInfo, job_key_from, rank_from

ELASTIC = {"TORCHELASTIC_RUN_ID": "job7", "MASTER_ADDR": "n0", "MASTER_PORT": "29500"}
SLURM = {"SLURM_JOB_ID": "812", "SLURM_RESTART_COUNT": "1"}
SESSION = "n0/4711@123"


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"CKPTGATE_RUN_ID": "r", **SLURM, **ELASTIC}, "run:r"),
        ({**SLURM, **ELASTIC}, "slurm:812+1"),
        ({"SLURM_JOB_ID": "812"}, "slurm:812+0"),
        (ELASTIC, "torchelastic:job7@n0:29500"),
        ({**ELASTIC, "TORCHELASTIC_RUN_ID": "none"}, "session:" + SESSION),
        ({**ELASTIC, "TORCHELASTIC_RUN_ID": ""}, "session:" + SESSION),
        ({"TORCHELASTIC_RUN_ID": "job7"}, "session:" + SESSION),
        ({"TORCHELASTIC_RESTART_COUNT": "3"}, "session:" + SESSION),
        ({"CKPTGATE_RUN_ID": ""}, "session:" + SESSION),
        ({}, "session:" + SESSION),
    ],
)
def test_the_best_variable_decides(environ: dict[str, str], expected: str) -> None:
    assert str(job_key_from(environ, SESSION)) == expected


def test_a_restart_of_the_job_is_another_incarnation() -> None:
    again = {**SLURM, "SLURM_RESTART_COUNT": "2"}
    assert job_key_from(SLURM, SESSION) != job_key_from(again, SESSION)


def test_a_caller_of_whom_nothing_is_known_is_outside() -> None:
    assert job_key_from({}, "") == OUTSIDE
    assert not OUTSIDE.is_shared


def test_a_login_session_is_never_shared_between_nodes() -> None:
    shared = {kind for kind in JobKind if JobKey(kind, "x").is_shared}
    assert shared == {JobKind.RUN_ID, JobKind.SLURM, JobKind.TORCHELASTIC}


@given(kind=st.sampled_from(JobKind), value=st.text())
def test_a_key_s_text_gives_the_key_back(kind: JobKind, value: str) -> None:
    key = JobKey(kind, value)
    assert JobKey.parse(str(key)) == key


@pytest.mark.parametrize("text", ["", "run", "other:x", ":x"])
def test_another_text_is_no_job_key(text: str) -> None:
    with pytest.raises(ValueError, match=r"job key|JobKind"):
        JobKey.parse(text)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"RANK": "3", "WORLD_SIZE": "8"}, RankInfo(3, 8)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, RankInfo(1, 2)),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, RankInfo(0, 1)),
        ({"SLURM_PROCID": "5", "SLURM_NTASKS": "6"}, RankInfo(5, 6)),
        (
            {"RANK": "1", "WORLD_SIZE": "4", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"},
            RankInfo(1, 4),
        ),
        ({"RANK": "1"}, RankInfo()),
        ({"RANK": "x", "WORLD_SIZE": "8"}, RankInfo()),
        ({"RANK": "-1", "WORLD_SIZE": "8"}, RankInfo()),
        ({"RANK": "8", "WORLD_SIZE": "8"}, RankInfo()),
        ({}, RankInfo()),
    ],
)
def test_a_rank_counts_only_with_its_world(environ: dict[str, str], expected: RankInfo) -> None:
    assert rank_from(environ) == expected


def test_a_key_of_any_bytes_is_text():
    """An environment holds any bytes, documents and databases hold text."""
    told = b"nightly-\xff".decode("utf-8", "surrogateescape")
    for environ in (
        {"CKPTGATE_RUN_ID": told},
        {"SLURM_JOB_ID": told},
        {"TORCHELASTIC_RUN_ID": told, "MASTER_ADDR": told},
    ):
        key = job_key_from(environ, "node/1@2")
        assert "nightly-\\xff" in str(key)
        assert str(key).encode("utf-8")
        assert key.is_shared
        assert JobKey.parse(str(key)) == key
