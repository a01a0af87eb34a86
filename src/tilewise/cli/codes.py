"""The codes with which commands end; grammar.py's help says what they mean."""

OK, FAILED, USAGE, UNUSABLE, INTERRUPTED, UNREAD = 0, 1, 2, 3, 130, 141
