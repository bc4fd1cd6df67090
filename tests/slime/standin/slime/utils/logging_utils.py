"""Where metrics go: nowhere."""


def log(args, metrics, step_key):
    del args, metrics, step_key
