{{/* nats-server's own form. Who may connect, and its certificate, are in a file of the Secret. */}}
{{- define "weir.natsConf" -}}
{{- $name := printf "%s-nats" (include "weir.name" .) -}}
server_name: $POD_NAME
port: 4222
http_port: 8222
pid_file: /tmp/nats.pid
jetstream { store_dir: /data }
lame_duck_grace_period: 10s
lame_duck_duration: 30s
{{- if gt (int .Values.nats.replicas) 1 }}
cluster {
  name: {{ $name }}
  port: 6222
  routes: [
    {{- range $index := until (int .Values.nats.replicas) }}
    "nats://{{ $name }}-{{ $index }}.{{ $name }}-nodes:6222"
    {{- end }}
  ]
  {{- if include "weir.hasCredentials" . }}
  tls {
    cert_file: /etc/nats/credentials/nats.pem
    key_file: /etc/nats/credentials/nats.key
    ca_file: /etc/nats/credentials/ca.pem
    verify: true
  }
  {{- end }}
}
{{- end }}
{{- if include "weir.hasCredentials" . }}
include ../credentials/nats-roles.conf
{{- end }}
{{- end -}}
