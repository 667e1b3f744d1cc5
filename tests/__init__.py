"""A regular package: without this file any installed package named `tests` would be found in place of it."""
