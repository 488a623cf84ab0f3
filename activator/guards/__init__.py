"""Guards of language models: what a function declares with `guard=` checks prompts before an
engine gets them, and generated text before its caller does.

`guards` checks a call at both stages, `texts` finds the text in requests and answers, and `stream`
holds a streamed answer back as far as needed. `checks` decides: by patterns, then by the guard's
function (`function_client`). `refusals` reports what was refused to the controller's audit log."""
