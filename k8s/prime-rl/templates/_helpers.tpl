{{- define "labels" -}}
{{ include "selector" . }}
app: prime-rl
{{- with .root.Values.example }}
example: {{ . | quote }}
{{- end }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{- define "selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with .name }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- end }}

{{- define "claim" -}}
{{- $s := .Values.storage -}}
{{- $s.existingClaim | default $s.name | default (printf "%s-data" .Release.Name) -}}
{{- end }}

{{- define "secret" -}}
{{- with .Values.apiKey }}{{ .existingSecret | default (ternary (printf "%s-api-key" $.Release.Name) "" (ne .value "")) }}{{ end -}}
{{- end }}

{{- /* The name by which the pods of a component find pod number .index of it. */ -}}
{{- define "pod" -}}
{{- if eq .root.Values.workload "JobSet" -}}
{{ printf "%s-%s-0-%d.%s-%s" .root.Release.Name .name (int .index) .root.Release.Name .name }}
{{- else -}}
{{ printf "%s-%s-%d.%s-%s" .root.Release.Name .name (int .index) .root.Release.Name .name }}
{{- end -}}
{{- end }}

{{- define "url" -}}
{{ printf "http://%s-inference:%d/v1" .Release.Name (int .Values.inference.port) }}
{{- end }}

{{- define "urls" -}}
{{- $urls := list -}}
{{- $port := int .Values.inference.port -}}
{{- if eq (int .Values.inference.replicas) 1 -}}
{{- $urls = list (include "url" .) -}}
{{- else -}}
{{- range $i := until (int .Values.inference.replicas) -}}
{{- $urls = append $urls (printf "http://%s:%d/v1" (include "pod" (dict "root" $ "name" "inference" "index" $i)) $port) -}}
{{- end -}}
{{- end -}}
{{ $urls | toJson }}
{{- end }}

{{- /* The words of a component's command, as JSON. */ -}}
{{- define "words" -}}
{{- $v := index .root.Values .name -}}
{{- $out := .root.Values.outputDir -}}
{{- $words := list .name "@" $v.config -}}
{{- if eq .name "inference" -}}
{{- $words = concat $words (list "--host" "0.0.0.0" "--port" (toString (int $v.port)) "--allowed-dirs" "[\"/data\"]") -}}
{{- else if eq .name "orchestrator" -}}
{{- $words = concat $words (list "--output-dir" $out "--client.base-url" (include "urls" .root) "--client.ready-timeout" "3600") -}}
{{- else -}}
{{- $words = concat $words (list "--output-dir" $out "--resume" "auto") -}}
{{- if $v.checkpoints -}}
{{- $words = concat $words (list "--ckpt.interval" (toString (int $v.checkpoints))) -}}
{{- end -}}
{{- $nodes := int $v.replicas -}}
{{- $ranks := max 1 (int $v.gpus) -}}
{{- if or (gt $nodes 1) (gt $ranks 1) -}}
{{- $meet := printf "%s:%d" (include "pod" (dict "root" .root "name" .name "index" 0)) (int $v.port) -}}
{{- $ranked := list "python" "-m" "hone.launch.rank_launcher" "--ranks" (toString $ranks) "--nodes" (toString $nodes) "--node" "$(POD_INDEX)" "--meet" $meet -}}
{{- $words = concat $ranked $words -}}
{{- end -}}
{{- end -}}
{{ concat $words $v.args | toJson }}
{{- end }}

{{- define "script" -}}
# Starts the component, hands signals on to it, and says how it ended.
asked=no
trap 'asked=yes; kill -TERM "$child"' TERM
trap '' USR1
"$@" &
child=$!
trap 'kill -USR1 "$child"' USR1
echo "$child" > /tmp/component
code=0
while kill -0 "$child" 2>/dev/null; do
  wait "$child"
  code=$?
done
echo "=== ended with code $code"
{{- if eq .Values.workload "StatefulSet" }}
[ "$code" -eq 0 ] && [ "$asked" = no ] || exit "$code"
echo "=== the pod stays, to be looked into"
trap 'exit 0' TERM
sleep infinity &
wait
{{- else }}
exit "$code"
{{- end }}
{{- end }}

{{- define "podspec" -}}
{{- $v := index .root.Values .name -}}
{{- $values := .root.Values -}}
{{- $secret := include "secret" .root -}}
automountServiceAccountToken: false
enableServiceLinks: false
terminationGracePeriodSeconds: {{ int $v.gracePeriod }}
securityContext: {{- toYaml $values.podSecurityContext | nindent 2 }}
{{- with $values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
{{- with $values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with $v.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $v.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $v.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- $waits := and (eq .name "orchestrator") $v.autoStart $values.inference.autoStart }}
{{- if or $waits (not $secret) }}
initContainers:
  {{- if not $secret }}
  - name: key
    {{- include "container" . | nindent 4 }}
    command:
      - bash
      - -ec
      - |
        [ -s "$HONE_API_KEY_FILE" ] && exit
        umask 077
        mkdir -p "${HONE_API_KEY_FILE%/*}"
        made=$(mktemp "$HONE_API_KEY_FILE.XXXXXX")
        head -c 24 /dev/urandom | base64 > "$made"
        ln "$made" "$HONE_API_KEY_FILE" 2>/dev/null || true # of another pod
        rm "$made"
  {{- end }}
  {{- if $waits }}
  - name: wait-for-inference
    {{- include "container" . | nindent 4 }}
    command:
      - python
      - -c
      - |
        import json, os, time, urllib.request
        for url in json.loads(os.environ["INFERENCE_URLS"]):
            health, told = url.removesuffix("/v1") + "/health", 0.0
            while True:
                try:
                    urllib.request.urlopen(health, timeout=5).close()
                    break
                except OSError as error:
                    if time.monotonic() - told > 30:
                        told = time.monotonic()
                        print(f"waiting for {health}: {error}", flush=True)
                    time.sleep(1)
  {{- end }}
{{- end }}
containers:
  - name: {{ .name }}
    {{- include "container" . | nindent 4 }}
    {{- if $v.autoStart }}
    command:
      - bash
      - -c
      - |
        {{- include "script" .root | nindent 8 }}
      - {{ .name }}
      {{- range include "words" . | fromJsonArray }}
      - {{ . | quote }}
      {{- end }}
    {{- else }}
    command: [bash, -c, "trap 'exit 0' TERM; sleep infinity & wait"]
    {{- end }}
    {{- if eq .name "inference" }}
    ports:
      - { name: http, containerPort: {{ int $v.port }} }
    {{- if $v.autoStart }}
    startupProbe:
      httpGet: { path: /health, port: http }
      periodSeconds: 2
      failureThreshold: 1800
    readinessProbe:
      httpGet: { path: /health, port: http }
      periodSeconds: 5
      timeoutSeconds: 5
    livenessProbe:
      httpGet: { path: /health, port: http }
      periodSeconds: 30
      timeoutSeconds: 15
      failureThreshold: 6
    {{- end }}
    {{- end }}
    {{- if and (eq .name "trainer") $v.autoStart }}
    lifecycle:
      preStop: # a checkpoint at the next step, and the end
        exec:
          command:
            - bash
            - -c
            - p=$(cat /tmp/component) && kill -USR1 "$p" && while kill -0 "$p"; do sleep 0.2; done 2>/dev/null || true
    {{- end }}
    resources:
      {{- $r := $v.resources }}
      {{- $limits := $r.limits | default dict }}
      {{- if $v.gpus }}
      {{- $limits = merge (dict $values.gpuResource (int $v.gpus)) $limits }}
      {{- end }}
      requests: {{- toYaml ($r.requests | default dict) | nindent 8 }}
      limits: {{- toYaml $limits | nindent 8 }}
volumes:
  - name: data
    persistentVolumeClaim: { claimName: {{ include "claim" .root | quote }} }
  - name: config
    configMap: { name: {{ .root.Release.Name }}-config }
  - name: tmp
    emptyDir: {}
  - name: shm
    emptyDir: { medium: Memory, sizeLimit: {{ $v.shm | quote }} }
{{- end }}

{{- /* What all containers of a component have. */ -}}
{{- define "container" -}}
{{- $v := index .root.Values .name -}}
{{- $secret := include "secret" .root -}}
{{- with .root.Values.image -}}
image: {{ printf "%s:%s" .repository (.tag | default $.root.Chart.AppVersion) | quote }}
imagePullPolicy: {{ .pullPolicy }}
{{- end }}
workingDir: /app
securityContext: {{- toYaml .root.Values.securityContext | nindent 2 }}
env:
  - { name: HOME, value: /tmp }
  - { name: XDG_CACHE_HOME, value: /data/.cache } # models of the hub, compiled kernels
  - { name: TRITON_CACHE_DIR, value: /data/.cache/triton }
  - { name: OUTPUT_DIR, value: /data } # below which servers read weights
  - { name: INFERENCE_URL, value: {{ include "url" .root | quote }} }
  - { name: INFERENCE_URLS, value: {{ include "urls" .root | quote }} }
  - { name: POD_NAME, valueFrom: { fieldRef: { fieldPath: metadata.name } } }
  {{- if eq .root.Values.workload "JobSet" }}
  - name: POD_INDEX
    valueFrom: { fieldRef: { fieldPath: "metadata.annotations['batch.kubernetes.io/job-completion-index']" } }
  {{- else }}
  - name: POD_INDEX
    valueFrom: { fieldRef: { fieldPath: "metadata.labels['apps.kubernetes.io/pod-index']" } }
  {{- end }}
  {{- if $secret }}
  - name: HONE_API_KEY
    {{- $key := ternary .root.Values.apiKey.secretKey "api-key" (ne .root.Values.apiKey.existingSecret "") }}
    valueFrom: { secretKeyRef: { name: {{ $secret | quote }}, key: {{ $key | quote }} } }
  {{- else }}
  - { name: HONE_API_KEY_FILE, value: /data/.keys/{{ .root.Release.Name }} }
  {{- end }}
  {{- with $v.env }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
volumeMounts:
  - { name: data, mountPath: /data }
  - { name: config, mountPath: /config, readOnly: true }
  - { name: tmp, mountPath: /tmp }
  - { name: shm, mountPath: /dev/shm }
{{- end }}

{{- define "template" -}}
metadata:
  labels: {{- include "labels" . | nindent 4 }}
  annotations:
    checksum/config: {{ toJson .root.Values.config | sha256sum }}
    {{- with .root.Values.annotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}
