"""A helper in a file of its own, as models have."""


def is_decode(tokens):
    return tokens == 1


def scale_for(tokens):
    if tokens > 256:
        return 0.5
    return 2.0
