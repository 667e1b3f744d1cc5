"""Where settings come from, which source wins, and how a bad value is named."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.core.fields import ByteSize, format_size, parse_size, parse_text
from weir.runtime.config import ConfigError, ServiceConfig, load_config, read_config, resolve_config, setting


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class PaintConfig(ServiceConfig):
    """A service that paints."""

    num_coats: int = setting(1, "Coats of paint.")
    colour: Colour = field(default=Colour.RED, metadata={"help": "Colour."})
    finish: Literal["matt", "gloss"] = setting("matt", "Finish.")
    is_outdoor: bool = setting(False, "Whether it rains on it.")
    brushes: tuple[int, ...] = setting((), "Widths.")
    primer: str | None = setting(None, "What goes below, 100 % of the surface.")
    bucket_bytes: ByteSize = setting(4 << 20, "Size of a bucket.")
    derived: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_coats < 1:
            raise ValueError(f"num_coats {self.num_coats}: must be at least 1")


def read(*argv: str, toml: Path | None = None, environ: Mapping[str, str] | None = None) -> PaintConfig:
    return read_config(PaintConfig, argv, environ=environ or {}, toml_path=toml)


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "weir.toml"
    path.write_text(text)
    return path


@given(
    in_toml=st.none() | st.integers(1, 10**9),
    in_table=st.none() | st.integers(1, 10**9),
    in_environment=st.none() | st.integers(1, 10**9),
    in_flag=st.none() | st.integers(1, 10**9),
)
def test_a_later_source_wins_over_every_earlier_one(
    tmp_path_factory: pytest.TempPathFactory,
    in_toml: int | None,
    in_table: int | None,
    in_environment: int | None,
    in_flag: int | None,
) -> None:
    toml = "" if in_toml is None else f"num_coats = {in_toml}\n"
    toml += "[scheduler]\nnum_coats = 5\n" + ("" if in_table is None else f"[gateway]\nnum_coats = {in_table}\n")
    path = write(tmp_path_factory.mktemp("config"), toml)
    config = resolve_config(
        PaintConfig,
        "gateway",
        flags={} if in_flag is None else {"num_coats": str(in_flag)},
        environ={} if in_environment is None else {"WEIR_NUM_COATS": str(in_environment)},
        toml_path=path,
    )
    sources = (in_flag, in_environment, in_table, in_toml, 1)
    assert config.num_coats == next(value for value in sources if value is not None)


def test_every_type_is_read_from_text_and_from_toml(tmp_path: Path) -> None:
    flags = ("--colour", "blue", "--finish", "gloss", "--is-outdoor", "--brushes", "10, 20", "--primer", "zinc")
    toml = 'colour = "blue"\nfinish = "gloss"\nis_outdoor = true\nbrushes = [10, 20]\nprimer = "zinc"\ngrace_s = 3\n'
    expected = PaintConfig(
        colour=Colour.BLUE, finish="gloss", is_outdoor=True, brushes=(10, 20), primer="zinc", grace_s=3.0
    )
    assert read(*flags, "--grace-s", "3") == expected
    assert read(toml=write(tmp_path, toml)) == expected
    environ = {"WEIR_COLOUR": "blue", "WEIR_FINISH": "gloss", "WEIR_IS_OUTDOOR": "yes", "WEIR_BRUSHES": "10,20"}
    assert read(environ={**environ, "WEIR_PRIMER": "zinc", "WEIR_GRACE_S": "3"}) == expected
    assert read("--no-is-outdoor", environ={"WEIR_IS_OUTDOOR": "1"}).is_outdoor is False
    assert read("--primer", "").primer is None


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("-1", -1),
        (" 4096 ", 4096),
        ("16GiB", 16 << 30),
        ("1.5 gib", 3 << 29),
        ("0.1KiB", 102),
        ("2TiB", 2 << 40),
        ("3MB", 3_000_000),
        ("1kb", 1000),
    ],
)
def test_a_size_may_have_a_unit_wherever_it_is_given(tmp_path: Path, text: str, num_bytes: int) -> None:
    assert read("--bucket-bytes", text).bucket_bytes == num_bytes
    assert read(environ={"WEIR_BUCKET_BYTES": text}).bucket_bytes == num_bytes
    assert read(toml=write(tmp_path, f'bucket_bytes = "{text}"\n')).bucket_bytes == num_bytes
    assert read(toml=write(tmp_path, f"bucket_bytes = {num_bytes}\n")).bucket_bytes == num_bytes


@given(st.integers(0, 1 << 50))
def test_a_size_is_shown_as_it_could_be_given(num_bytes: int) -> None:
    shown = format_size(num_bytes)
    assert parse_size(shown.removesuffix("bytes")) == pytest.approx(num_bytes, rel=0.06)


def test_help_shows_sizes_with_their_units(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read("--help")
    assert "--bucket-bytes SIZE Size of a bucket. Default: 4 MiB" in " ".join(capsys.readouterr().out.split())


@given(st.lists(st.integers()), st.booleans(), st.floats(allow_nan=False))
def test_values_survive_being_written_as_text(numbers: list[int], flag: bool, number: float) -> None:
    assert parse_text(tuple[int, ...], ",".join(map(str, numbers))) == tuple(numbers)
    assert parse_text(bool, str(flag)) is flag
    assert parse_text(float, str(number)) == number


@pytest.mark.parametrize(
    ("argv", "environ", "message"),
    [
        (("--num-coats", "two"), {}, "--num-coats 'two': must be a whole number"),
        ((), {"WEIR_GRACE_S": "soon"}, "WEIR_GRACE_S='soon': must be a number"),
        ((), {"WEIR_COLOUR": "pink"}, "WEIR_COLOUR='pink': must be one of red, blue"),
        ((), {"WEIR_IS_OUTDOOR": "maybe"}, "WEIR_IS_OUTDOOR='maybe': must be true or false"),
        (("--brushes", "1,b"), {}, "--brushes '1,b': must be a list, each a whole number"),
        (("--bucket-bytes", "16 buckets"), {}, "--bucket-bytes '16 buckets': must be a number of bytes, or one with"),
        ((), {"WEIR_BUCKET_BYTES": "GiB"}, "WEIR_BUCKET_BYTES='GiB': must be a number of bytes, or one with a unit: "),
        (("--num-coats", "0"), {}, "num_coats 0: must be at least 1 (from --num-coats)"),
        ((), {"WEIR_NUM_COATS": "0"}, "num_coats 0: must be at least 1 (from WEIR_NUM_COATS)"),
        ((), {"WEIR_GRACE_S": "nan"}, "grace_s nan: must be in [0, 3600] (from WEIR_GRACE_S)"),
        (
            ("--listen", "8080"),
            {},
            "listen '8080': must be HOST:PORT with a port of 0 to 65535, unix:/PATH or unix:/FOLDER/",
        ),
        (("--listen", "unix:sock"), {}, "listen 'unix:sock': the path of a Unix socket must be absolute"),
        (("--instance", "a/b"), {}, "instance 'a/b': use 1 to 40 characters of A-Z a-z 0-9 _ -"),
    ],
)
def test_a_bad_value_is_named_with_its_source(argv: tuple[str, ...], environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(*argv, environ=environ)
    assert caught.value.message.startswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num_coats = 'two'", "num_coats = 'two': must be a whole number"),
        ("num_coats = true", "num_coats = True: must be a whole number"),
        ("bucket_bytes = '1 PiB'", "bucket_bytes = '1 PiB': must be a number of bytes, or one with a unit: 16GiB, "),
        ("bucket_bytes = 1.5", "bucket_bytes = 1.5: must be a number of bytes"),
        ("num_coats = 0", "num_coats 0: must be at least 1 (from "),
        ("is_outdoor = 1", "is_outdoor = 1: must be true or false"),
        ("brushes = 3", "brushes = 3: must be a list, each a whole number"),
        ("colour = 'pink'", "colour = 'pink': must be one of red, blue"),
        ("num_coat = 2", "num_coat: there is no such setting"),
        ("derived = 2", "derived: there is no such setting"),
        ("num_coats = ", "Invalid value"),
    ],
)
def test_a_bad_toml_file_is_named_with_the_key(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        read(toml=path)
    assert str(path) in caught.value.message
    assert message in caught.value.message


def test_the_file_is_named_by_flag_then_environment_then_caller(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.toml" for number in (1, 2, 3)]
    for number, path in enumerate(paths, start=1):
        path.write_text(f"num_coats = {number}")
    flag, environment, caller = paths
    assert read("--config", str(flag), toml=caller, environ={"WEIR_CONFIG": str(environment)}).num_coats == 1
    assert read(toml=caller, environ={"WEIR_CONFIG": str(environment)}).num_coats == 2
    assert read(toml=caller).num_coats == 3
    with pytest.raises(ConfigError, match=r"none\.toml"):
        read("--config", str(tmp_path / "none.toml"))


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "10.0.0.7:50051", "[::]:0", "worker-3.internal:50051"])
def test_an_address_that_other_machines_reach_is_for_those_who_say_so(listen: str) -> None:
    with pytest.raises(
        ConfigError, match=r"listen .*: other machines reach it, .* tls_cert, .* set insecure_listen where"
    ):
        read("--listen", listen)
    assert read("--listen", listen, "--insecure-listen").listen == listen


@pytest.mark.parametrize(
    "listen", ["127.0.0.1:0", "[::1]:0", "localhost:0", "unix:/run/weir/a.sock", "unix:/run/weir/"]
)
def test_what_this_machine_alone_reaches_may_be_listened_on(listen: str) -> None:
    assert read("--listen", listen).listen == listen


def test_a_folder_of_sockets_has_room_for_their_names() -> None:
    longest = "/" + "a" * 92 + "/"
    assert read("--listen", f"unix:{longest}").listen == f"unix:{longest}"
    with pytest.raises(ConfigError, match="set WEIR_RUNTIME_DIR to a shorter folder"):
        read("--listen", f"unix:/a{longest[1:]}")


def test_a_socket_path_that_the_kernel_would_cut_is_refused() -> None:
    longest = "/" + "a" * 106
    assert read("--listen", f"unix:{longest}").listen == f"unix:{longest}"
    with pytest.raises(ConfigError, match="set WEIR_RUNTIME_DIR to a shorter folder"):
        read("--listen", f"unix:{longest}b")


def load_fails(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as ended:
        load_config(PaintConfig, argv, environ={})
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_bad_values_and_unknown_flags_end_the_process_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert "error: --num-coats 'x': must be a whole number\n" in load_fails(capsys, "--num-coats", "x")
    assert "unrecognized arguments: --num-coat 2" in load_fails(capsys, "--num-coat", "2")


def test_help_lists_every_setting_with_its_default(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        load_config(PaintConfig, ["--help"], environ={})
    text = capsys.readouterr().out
    assert ended.value.code == 0
    assert "A service that paints." in text
    assert "--num-coats N" in text
    assert "Coats of paint. Default: 1" in text
    assert "--colour red|blue" in text
    assert "What goes below, 100 % of the surface." in text
    assert "--no-is-outdoor" in text
    assert "derived" not in text


def test_files_of_certificates_are_given_together_or_not_at_all() -> None:
    flags = {"tls_cert": "a.pem", "tls_key": "a.key", "tls_ca": "ca.pem"}
    given = [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", value)]
    assert read_config(ServiceConfig, [*given, "--listen", "0.0.0.0:0"], environ={}).tls_ca == "ca.pem"
    with pytest.raises(ConfigError, match=r"tls_key is empty: tls_cert needs it; .* \(from WEIR_TLS_CERT\)"):
        read_config(ServiceConfig, [], environ={"WEIR_TLS_CERT": "a.pem", "WEIR_TLS_CA": "ca.pem"})
    with pytest.raises(ConfigError, match=r"instance 'My_Stack': in certificates use"):
        read_config(ServiceConfig, [*given, "--instance", "My_Stack"], environ={})
