"""Triton's cache, from which a GPU's kernels are loaded, is looked at before anything is."""

from pathlib import Path

import pytest

from weir.core.cache_dir import check_triton_cache
from weir.core.trusted_folder import UntrustedFolder


@pytest.mark.parametrize("variable", ["TRITON_CACHE_DIR", "TRITON_HOME"])
def test_a_folder_that_others_can_write_is_refused_wherever_it_was_set(tmp_path: Path, variable: str) -> None:
    folder = tmp_path if variable == "TRITON_CACHE_DIR" else tmp_path / ".triton" / "cache"
    check_triton_cache({variable: str(tmp_path)})
    assert folder.is_dir()
    folder.chmod(0o777)
    with pytest.raises(UntrustedFolder, match="set TRITON_CACHE_DIR to a folder of your own"):
        check_triton_cache({variable: str(tmp_path)})
