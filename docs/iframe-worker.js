// The site's search runs in a worker, and browsers start no worker for a page that is opened from a disk. There, a
// worker's script runs in a hidden frame instead. The name of this file keeps the offline plugin from fetching another.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      this.inside = new Promise((ready) => {
        frame.onload = () => {
          frame.contentWindow.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
          ready(frame.contentWindow)
        }
      })
      frame.hidden = true
      frame.srcdoc = `<script src="${new URL(url, document.baseURI)}"></script>`
      document.body.append(frame)
    }

    postMessage(data) {
      this.inside.then((inside) => inside.dispatchEvent(new MessageEvent("message", { data })))
    }
  }
}
