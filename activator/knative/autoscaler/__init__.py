"""Class `pilotlight.dev` (experimental): one of the activators decides how many pods each revision has.

What activators say of themselves (`statements`, `board`), what it comes to (`merging`), the decision (`scaling`), what Knative is told of
it (`podautoscalers`, `conditions`, `serverless`), and who does it (`leader`).
"""
