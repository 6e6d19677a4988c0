"""One torch thread: the models here are tiny."""

from tests.one_thread import one_thread as one_thread
