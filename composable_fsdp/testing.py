"""A module of earlier versions. An import of it says what to do instead."""

import composable_fsdp

composable_fsdp.testing  # noqa: B018 (raises ImportError)
