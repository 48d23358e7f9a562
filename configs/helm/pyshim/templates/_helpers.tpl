{{- define "pyshim.labels" -}}
app.kubernetes.io/name: {{ .name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end -}}

{{- define "pyshim.image" -}}
{{- $image := .Values.image -}}
{{- if $image.digest -}}
{{ $image.repository }}@{{ $image.digest }}
{{- else -}}
{{ $image.repository }}:{{ $image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{- define "pyshim.pull" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{- /* The enabled classes, the usual one first: a node is ready when its test pod runs with that. */ -}}
{{- define "pyshim.handlers" -}}
{{- $found := list -}}
{{- range $name := list "pykata" "pykata-tdx" "pykata-snp" "pykata-remote" "pykata-debug" -}}
{{- if (get $.Values.classes $name).enabled -}}
{{- $found = append $found $name -}}
{{- end -}}
{{- end -}}
{{- if not $found -}}
{{- fail "no runtime class is enabled: set classes.pykata.enabled or another's" -}}
{{- end -}}
{{- join "," $found -}}
{{- end -}}

{{- define "pyshim.unprivileged" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
seccompProfile: {type: RuntimeDefault}
{{- end -}}
