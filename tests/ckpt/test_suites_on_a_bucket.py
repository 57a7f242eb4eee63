"""The suites of fsspec, of universal_pathlib and of what reads and writes by fsspec, on SeaweedFS.

Needs `pip install --group ecosystem`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.ckpt.places import Place, placed
from tests.ckpt.test_abstract import (  # noqa: F401 - collected here, too
    TestCopyCheckpoint,
    TestCopyPlain,
    TestGetCheckpoint,
    TestGetPlain,
    TestOpenCheckpoint,
    TestOpenPlain,
    TestPipeCheckpoint,
    TestPipePlain,
    TestPutCheckpoint,
    TestPutPlain,
)
from tests.ckpt.test_ecosystem import (  # noqa: F401
    _needs,
    options,
    test_lightning_saves_to_and_resumes_from_urls,
    test_pandas_and_dask_read_and_write,
    test_pyarrow_reads_and_writes_data_sets_and_copies_trees_as_ray_does,
    test_the_asynchronous_wrapper_serves_many_at_once,
    test_zarr_keeps_arrays,
)
from tests.ckpt.test_universal_pathlib import source, test_its_own_suite_passes  # noqa: F401
from tests.conftest import give_credentials
from tests.e2e.buckets import environment
from tests.s3.servers import Bucket, Server

# Of what others warn here nothing is ours.
pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def place(seaweed: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A prefix of a bucket, and a spool."""
    bucket = Bucket.make(seaweed)
    with pytest.MonkeyPatch.context() as patch:
        give_credentials(seaweed, patch)
        for name, value in environment(bucket).items():
            patch.setenv(name, value)
        url = bucket.below("ckpts").url
        with placed(tmp_path_factory.mktemp("ckpt"), store=url, env=environment(bucket)) as made:
            yield made
    bucket.destroy()
