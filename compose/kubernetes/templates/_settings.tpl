{{/* What weir.toml says, as YAML; `settings` of the values go over it. */}}
{{- define "weir.settings" -}}
{{- $safe := include "weir.hasCredentials" . -}}
{{- $folder := "/etc/weir/credentials" -}}
instance: {{ include "weir.instance" . | quote }}
model: {{ .Values.model | quote }}
device: {{ .Values.device }}
precision: {{ .Values.precision }}
log_format: {{ .Values.logFormat }}
otlp_endpoint: {{ .Values.otlpEndpoint | quote }}
nats_url: {{ include "weir.natsUrl" . }}
insecure_listen: {{ not $safe }}
{{- if $safe }}
nats_ca_file: {{ $folder }}/ca.pem
{{- end }}
host:
  nats: {{ include "weir.natsUrl" . }}
  prefill: {{ .Values.hosts.prefill }}
  decode: {{ .Values.hosts.decode }}
  grace_s: {{ .Values.hosts.graceSeconds }}
  start_timeout_s: {{ .Values.hosts.startSeconds }}
  first_port: 7000
  metrics_port: 9464
  probe_port: 9460
  runtime_dir: /dev/shm/run
  {{- if $safe }}
  credentials_dir: {{ $folder }}
  {{- end }}
{{- range $role := list "scheduler" "gateway" }}
{{ $role }}:
  listen: 0.0.0.0:50051
  metrics_host: 0.0.0.0
  metrics_port: 9464
  runtime_dir: /tmp/run
  {{- if $safe }}
  tls_cert: {{ $folder }}/{{ $role }}.pem
  tls_key: {{ $folder }}/{{ $role }}.key
  tls_ca: {{ $folder }}/ca.pem
  nats_seed_file: {{ $folder }}/nats-{{ $role }}.seed
  {{- end }}
  {{- if eq $role "scheduler" }}
  limits_file: /etc/weir/config/limits.toml
  nats_replicas: {{ ternary $.Values.nats.replicas 1 (eq (include "weir.servesNats" $) "true") }}
  {{- if $safe }}
  admin_key_file: {{ $folder }}/admin.key
  {{- end }}
  {{- else }}
  http_host: 0.0.0.0
  http_port: 8000
  grace_s: {{ $.Values.gateways.graceSeconds }}
  {{- if $.Values.publicTls.secretName }}
  public_tls_cert: /etc/weir/public-tls/tls.crt
  public_tls_key: /etc/weir/public-tls/tls.key
  {{- end }}
  {{- if not $.Values.gateways.batchStore.secretName }}
  batch_store: "off"
  {{- end }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* The file that all processes read. */}}
{{- define "weir.weirToml" -}}
{{- $settings := mergeOverwrite (include "weir.settings" . | fromYaml) .Values.settings -}}
{{- include "weir.toml" (dict "table" "" "values" $settings) | trim -}}
{{- end -}}

{{/* A number of a YAML file is a float here, also where it was none. */}}
{{- define "weir.scalar" -}}
{{- if and (kindIs "float64" .) (eq . (floor .)) }}{{ int64 . }}{{ else if kindIs "float64" . }}{{ . }}{{ else }}{{ toJson . }}{{ end -}}
{{- end -}}

{{/* TOML of (dict "table" NAME "values" MAP); tables come after what stands outside them. */}}
{{- define "weir.toml" -}}
{{- $table := .table -}}
{{- range $name, $value := .values }}
{{- if not (kindIs "map" $value) }}
{{ $name }} = {{ include "weir.scalar" $value }}
{{- end }}
{{- end }}
{{- range $name, $value := .values }}
{{- if kindIs "map" $value }}
{{- $path := ternary $name (printf "%s.%s" $table $name) (empty $table) }}

[{{ $path }}]
{{- include "weir.toml" (dict "table" $path "values" $value) }}
{{- end }}
{{- end }}
{{- end -}}
