"""Warm pods, which become instances of a revision by promotion: asked for in `promotion`, replaced
by the revision's own pods in `handover`, and deleted in `unclaimed_pods` when no activator has
them.

Activators have no rights in the namespace of these pods: the controller claims and deletes them."""
