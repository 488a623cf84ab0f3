"""The Open Inference Protocol (KServe's v2): only its requests and answers
(`arguments.translations` translates them)."""
