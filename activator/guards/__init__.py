"""Guards of language models: what a function declares with `guard=` is asked about prompts before
an engine gets them, and about generated text before its caller does.

`guards` runs a call between both, `texts` finds what is said in requests and answers, and `stream`
holds a streamed answer back as far as needed. `checks` decides: by patterns, then by the guard's
function (`functions`). `refusals` reports what was refused to the controller's audit log."""
