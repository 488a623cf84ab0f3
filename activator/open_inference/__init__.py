"""The Open Inference Protocol (KServe's v2): requests and answers are translated, and nothing else
happens here."""
