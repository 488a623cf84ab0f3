"""The Open Inference Protocol (KServe's v2): only the translation of requests and answers."""
