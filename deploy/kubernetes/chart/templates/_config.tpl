{{- /* platform.yaml: what the chart knows, and over it what values.config says. home and run are directories inside of the volumes: they are
       made private by their owner, which a volume's own root is not (it is root's, and open to the pod's group) */ -}}
{{- define "pilotlight.config" -}}
{{- $name := include "pilotlight.fullname" . -}}
{{- $ns := .Release.Namespace -}}
{{- $platform := dict
    "home" (printf "%s/home" .Values.node.hostPath)
    "run" "/run/pilotlight/sockets"
    "fleet" "knative"
    "key_file" "/etc/pilotlight/secrets/platform.key"
    "activator_key_file" "/etc/pilotlight/secrets/activator.key"
    "metrics_token_file" "/etc/pilotlight/secrets/metrics.token"
    "controller_url" (printf "https://%s-controller.%s.svc:8711" $name $ns)
    "tls_cert" "/etc/pilotlight/tls/tls.crt"
    "tls_key" "/etc/pilotlight/tls/tls.key"
    "tls_ca" "/etc/pilotlight/tls/ca.crt" -}}
{{- $cluster := dict
    "namespace" $ns
    "controller_account" (printf "%s-controller" $name)
    "activator_account" (printf "%s-activator" $name)
    "node_path" (printf "%s/node" .Values.node.hostPath) -}}
{{- $controller := dict
    "listen" "0.0.0.0:8711"
    "metrics_listen" "0.0.0.0:8702"
    "standby" true
    "node_key_file" "/etc/pilotlight/secrets/node.key"
    "database_url_file" "/etc/pilotlight/secrets/database-url" -}}
{{- $activator := dict
    "listen" "0.0.0.0:8700"
    "metrics_listen" "0.0.0.0:8701"
    "activators" (int .Values.activator.replicas)
    "drain_s" (int .Values.activator.drainSeconds)
    "shutdown_s" (int .Values.activator.shutdownSeconds) -}}
{{- if gt (int .Values.activator.replicas) 1 -}}
{{- $_ := set $activator "redis_url_file" "/etc/pilotlight/secrets/redis-url" -}}
{{- $_ := set $activator "sibling_url" (printf "https://%s-activator-{index}.%s-activators.%s.svc:8710" $name $name $ns) -}}
{{- $_ := set $activator "sibling_listen" "0.0.0.0:8710" -}}
{{- end -}}
{{- if .Values.node.enabled -}}
{{- $_ := set $activator "agents_listen" "0.0.0.0:8712" -}}
{{- end -}}
{{- $snapshotter := dict "metrics_listen" "0.0.0.0:8703" "pods" (printf "%s/node" .Values.node.hostPath) "activators" (printf "https://%s-activators.%s.svc:8712" $name $ns) -}}
{{- if .Values.config.cluster.restore_into_pods -}}
{{- if not (and .Values.node.privileged .Values.node.hostPID) -}}
{{- fail "config.cluster.restore_into_pods: the node agent enters pods: set node.privileged and node.hostPID" -}}
{{- end -}}
{{- $_ := set $snapshotter "restore_into_pods" true -}}
{{- if .Values.node.registrySecret -}}
{{- $_ := set $snapshotter "registry_login" "/etc/pilotlight/registry/config.json" -}}
{{- end -}}
{{- else if .Values.node.registrySecret -}}
{{- fail "node.registrySecret: nodes pull images of functions with config.cluster.restore_into_pods only" -}}
{{- end -}}
{{- if and .Values.config.cluster.warm_pods (not (and .Values.node.enabled .Values.node.privileged .Values.node.hostPID)) -}}
{{- fail "config.cluster.warm_pods: the node agent shows a promoted pod its tenant's directory: set node.enabled, node.privileged and node.hostPID" -}}
{{- end -}}
{{- $weights := dict
    "metrics_listen" "0.0.0.0:8704"
    "peers" (printf "dns:%s-nodes.%s.svc:8720" $name $ns)
    "peer_listen" "0.0.0.0:8720" -}}
{{- $ours := dict "platform" $platform "cluster" $cluster "activator" $activator "controller" $controller "snapshotter" $snapshotter "weight_cache" $weights -}}
{{- $config := mergeOverwrite $ours (deepCopy .Values.config) -}}
{{- range $section, $keys := $config }}
{{- if $keys }}
{{ $section }}:
  {{- toYaml $keys | nindent 2 }}
{{- end }}
{{- end }}
{{- end -}}
