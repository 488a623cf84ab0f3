"""Webhook endpoints, the queues of messages for them, and the worker that signs and posts them."""
