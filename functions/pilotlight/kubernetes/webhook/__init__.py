"""Validates a Service as Knative's webhook and schema would, before it is sent: each problem has
its field and a fix.

Reimplements knative/serving after v1.23 (pkg/apis/serving/k8s_validation.go, fieldmask.go,
v1/*_validation.go, config/core/300-resources). `services.check` is the entry point; it is pure."""
