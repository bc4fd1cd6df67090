"""Inference engines (vLLM, vLLM-Ascend, SGLang): hooks around their model runners.

A room below the frameworks: it knows engines and the capture, and neither verl nor slime. Whoever
starts an engine hands it a session (see :mod:`.handover`) and marks the requests that it wants
dumped (see :mod:`.marks`); a forward without a marked request passes straight through.
"""
