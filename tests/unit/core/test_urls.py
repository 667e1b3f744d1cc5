"""What is shown of a URL."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.core.urls import masked_url


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("nats://127.0.0.1:4222", "nats://127.0.0.1:4222"),
        ("nats://user:secret@host:4222", "nats://***@host:4222"),
        ("tls://token@host", "tls://***@host"),
        ("user:secret@host:4222", "***@host:4222"),
        ("nats://user:s@cr/e:t://@[::1]:4222", "nats://***@[::1]:4222"),
        ("nats://a:secret@one:1,nats://b:secret@two:2", "nats://***@two:2"),
        ("", ""),
    ],
)
def test_a_url_is_shown_without_its_credentials(url: str, shown: str) -> None:
    assert masked_url(url) == shown


@given(st.text(), st.text())
def test_no_password_is_shown_whatever_is_in_it(user: str, password: str) -> None:
    assert masked_url(f"nats://{user}:{password}@host:1") == "nats://***@host:1"
