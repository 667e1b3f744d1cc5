{{/* All pods' common part; takes (dict "root" $ "component" NAME). */}}
{{- define "weir.podSpec" -}}
serviceAccountName: {{ include "weir.name" .root }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets: {{ toJson . }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "weir.spread" -}}
topologySpreadConstraints:
  {{- range list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "weir.selector" $ | nindent 8 }}
  {{- end }}
{{- end -}}

{{- define "weir.containerSecurity" -}}
allowPrivilegeEscalation: false
capabilities: {drop: [ALL]}
readOnlyRootFilesystem: true
{{- end -}}

{{/* Of a container of Weir's image: its own address, and where its settings are. */}}
{{- define "weir.environment" -}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: WEIR_CONFIG
  value: /etc/weir/config/weir.toml
{{- end -}}

{{/* Of one that reads models: the hub's library keeps them, and its token, where these say. */}}
{{- define "weir.hubEnvironment" -}}
- name: HF_HOME
  value: /opt/weir-models/hub
{{- if .Values.hub.tokenSecretName }}
- name: HF_TOKEN_PATH
  value: /etc/weir/hub/token
{{- end }}
{{- end -}}

{{/* Fills the cache, which is a folder of this user's own in a volume that everybody may write: with what the image has
     for the processor that built it, and, where `isToPull`, with a model of the hub. Takes (dict "root" $ "isToPull" BOOL). */}}
{{- define "weir.cacheContainer" -}}
{{- $isOfHub := and (contains "/" .root.Values.model) (not (hasPrefix "/" .root.Values.model)) -}}
- name: cache
  image: {{ include "weir.image" .root }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  command: [sh, -c, "mkdir -p -m 0700 /cache/weir && cp -rpn /opt/weir-models/. /cache/weir/"]
  securityContext:
    {{- include "weir.containerSecurity" . | nindent 4 }}
  resources:
    requests: {cpu: 100m, memory: 128Mi}
    limits: {memory: 512Mi}
  volumeMounts:
    - {name: cache, mountPath: /cache}
{{- if and .isToPull $isOfHub }}
- name: model
  image: {{ include "weir.image" .root }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  command: [weir, pull, {{ .root.Values.model | quote }}]
  env:
    {{- include "weir.hubEnvironment" .root | nindent 4 }}
  securityContext:
    {{- include "weir.containerSecurity" . | nindent 4 }}
  resources:
    requests: {cpu: 100m, memory: 512Mi}
    limits: {memory: 2Gi}
  volumeMounts:
    - {name: tmp, mountPath: /tmp}
    {{- include "weir.modelMounts" .root | nindent 4 }}
{{- end }}
{{- end -}}

{{- define "weir.modelMounts" -}}
- {name: cache, mountPath: /opt/weir-models, subPath: weir}
{{- if .Values.modelClaimName }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- if .Values.hub.tokenSecretName }}
- {name: hub, mountPath: /etc/weir/hub, readOnly: true}
{{- end }}
{{- end -}}

{{- define "weir.modelVolumes" -}}
{{- if .Values.modelClaimName }}
- name: models
  persistentVolumeClaim: {claimName: {{ .Values.modelClaimName }}, readOnly: true}
{{- end }}
{{- if .Values.hub.tokenSecretName }}
- name: hub
  secret: {secretName: {{ .Values.hub.tokenSecretName }}, defaultMode: 0440, items: [{key: token, path: token}]}
{{- end }}
{{- end -}}

{{/* Asked of a process' own loop; takes (dict "port" NAME "startSeconds" N). */}}
{{- define "weir.probes" -}}
startupProbe:
  httpGet: {path: /ready, port: {{ .port }}}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ div (add .startSeconds 59) 5 }}
readinessProbe:
  httpGet: {path: /ready, port: {{ .port }}}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 2
livenessProbe:
  httpGet: {path: /live, port: {{ .port }}}
  periodSeconds: 10
  timeoutSeconds: 10
  failureThreshold: 10
{{- end -}}

{{/* Files of credentials for roles; takes (dict "root" $ "component" NAME "roles" LIST "keys" LIST): with cert-manager a
     Secret for each role and the keys of NATS, else the folder that `weir up --hosts` makes for the component. */}}
{{- define "weir.credentialsVolume" -}}
{{- $prefix := include "weir.secretPrefix" .root -}}
- name: credentials
  projected:
    defaultMode: 0440
    sources:
      {{- if eq .root.Values.credentials.source "secret" }}
      - secret: {name: {{ $prefix }}-{{ .component }}}
      {{- else }}
      {{- range $role := .roles }}
      - secret:
          name: {{ include "weir.name" $.root }}-tls-{{ $role }}
          items:
            - {key: tls.crt, path: {{ $role }}.pem}
            - {key: tls.key, path: {{ $role }}.key}
            {{- if eq $role (first $.roles) }}
            - {key: ca.crt, path: ca.pem}
            {{- end }}
      {{- end }}
      {{- with .keys }}
      - secret:
          name: {{ $prefix }}-nats-keys
          items:
            {{- range . }}
            - {key: {{ . }}, path: {{ . }}}
            {{- end }}
      {{- end }}
      {{- end }}
{{- end -}}
